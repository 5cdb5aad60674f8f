"""Forward and backward of one stage: whole, split into I and W, or recomputed."""
