"""Unmodified models as stages: each runs the model's own forward, with values of other stages received or absent.

record  `recorder.record` runs a copy of the model once, and labels each value with what it was made from (`recording`).
        Units are the modules whose calls count (`units`); what is drawn at random is in `draws`.
cut     `cutting.cut_recording` says what each stage runs, receives, sends and owns, or why a cut is refused.
run     `stage.CarvedStage` runs the model's forward. Calls of its own units run; those of earlier stages are answered
        (`running`), with received values, or with tensors that have a shape but no data (`absent`).
"""
