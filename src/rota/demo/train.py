"""Train the model of model.py as planned: rota run plan.json train.py --steps 40. It is a template for your own."""

import argparse
import time

import torch
from model import loss_fn, make_batch, make_model, make_optimizer

import rota

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
num_steps = parser.parse_args().steps

plan = rota.given_plan()
stages = rota.split(make_model(), plan.num_stages, plan.cuts, example=make_batch(1)[0])
torch.manual_seed(1)  # the same batches on every rank
with rota.Pipeline(stages, plan, loss_fn) as pipeline:
    optimizer = make_optimizer(pipeline.parameters())
    for step in range(1, num_steps + 1):
        began_s = time.perf_counter()
        loss = pipeline.step(*make_batch(32))  # forward and backward; gradients equal the unsplit model's
        optimizer.step()
        optimizer.zero_grad()
        if pipeline.rank == 0 and (step == 1 or step % max(num_steps // 6, 1) == 0):
            print(f"step {step:>4}/{num_steps}  loss {loss:.3f}  {time.perf_counter() - began_s:.3f} s", flush=True)
