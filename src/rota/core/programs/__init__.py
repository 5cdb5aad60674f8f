"""What each rank does in a step: its actions, what it enqueues on a device, and the proof that this cannot hang."""
