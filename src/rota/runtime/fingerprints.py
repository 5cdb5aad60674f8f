"""Whether the ranks were given the data that they should: those of a pipeline the same rows, replicas different ones.

Each rank that reads inputs or targets hashes all that it was given, by name and micro-batch. One exchange compares the
hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from rota.core.errors import PipelineError
from rota.runtime.messages import items

_DIGEST_BYTES = 8
_PLAIN = (type(None), bool, int, float, str)

#: Hashes by name and micro-batch; "" if nothing is compared.
Fingerprints = dict[str, list[str]]


def fingerprints(kind: str, microbatches: Sequence[Any], names: Sequence[str] = ()) -> Fingerprints:
    """Fingerprints of each part of a batch, by names such as "inputs['labels']".

    `kind`: "inputs" or "targets". `microbatches`: None where this rank was given nothing. `names`: of inputs by
    position.
    """
    by_name: Fingerprints = {}
    for m, microbatch in enumerate(microbatches):
        if microbatch is None:
            continue
        for key, value in items(microbatch) if isinstance(microbatch, (dict, tuple)) else ((0, microbatch),):
            name = names[key] if isinstance(key, int) and key < len(names) else key
            hashes = by_name.setdefault(f"{kind}[{name!r}]", [""] * len(microbatches))
            hashes[m] = fingerprint(value)
    return by_name


def fingerprint(value: Any) -> str:
    """The hash of all tensors and plain values in `value`; "" if it holds anything that cannot be compared."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    return digest.hexdigest() if _update(digest, value) else ""


def _update(digest: Any, value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_meta or value.is_nested or value.is_quantized:
            return False
        digest.update(f"{value.dtype}{list(value.shape)}".encode())
        digest.update(bytes_of(value))
        return True
    if isinstance(value, (dict, tuple, list)):
        digest.update(f"{type(value).__name__}{len(value)}".encode())
        return all(_update(digest, str(key)) and _update(digest, item) for key, item in items(value))
    if isinstance(value, _PLAIN):
        digest.update(repr(value).encode())
        return True
    return False


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor's elements, in row-major order."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # One row has any stride and is contiguous; a view as bytes needs 1.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data


# --- comparing --------------------------------------------------------------------------------------------------------


def _refuse_difference(by_process: Sequence[Fingerprints], replica: Sequence[int], names: Sequence[str]) -> None:
    """Raise PipelineError if two processes of a replica were given different data under one name."""
    first: dict[tuple[str, int], tuple[int, str]] = {}
    for process in replica:
        for name, hashes in by_process[process].items():
            for m, value in enumerate(hashes):
                other, expected = first.setdefault((name, m), (process, value)) if value else (process, value)
                if value != expected:
                    raise PipelineError(
                        f"{names[other]} and {names[process]} are of one pipeline, but were given different {name} "
                        f"(first in micro-batch {m}), so inputs and targets would belong to different rows. Give all "
                        f"ranks of a replica the same batch, None on those that read nothing of it: write "
                        f"DataLoader(dataset, batch_size=…, sampler=pipeline.sampler(dataset, shuffle=True, seed=0)), "
                        f"leave it out of accelerator.prepare, and give torch.manual_seed one number on all ranks. If "
                        f"this is intended, make Pipeline(…, check_data='never')"
                    )


def _equal_replicas(by_process: Sequence[Fingerprints], replicas: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """Two replicas that were given exactly the same data, or None. `replicas`: the processes of each."""
    first: dict[frozenset[tuple[str, int, str]], int] = {}
    for replica, processes in enumerate(replicas):
        values = frozenset(
            (name, m, value)
            for process in processes
            for name, hashes in by_process[process].items()
            for m, value in enumerate(hashes)
            if value
        )
        if values and first.setdefault(values, replica) != replica:
            return first[values], replica
    return None


def refuse_other_data(
    by_process: Sequence[Fingerprints],
    pipelines: Sequence[Sequence[int]],
    num_shards: int,
    names: Sequence[str],
    *,
    compare_replicas: bool,
) -> None:
    """Raise PipelineError, on all processes, unless the data that they were given fits.

    `pipelines`: the processes of each pipeline by rank, all shards of the first replica, then of the next, with
    `num_shards` pipelines per replica. `compare_replicas`: whether replicas must differ.
    """
    replicas = [
        [process for pipeline in pipelines[i : i + num_shards] for process in pipeline]
        for i in range(0, len(pipelines), num_shards)
    ]
    for processes in replicas:
        _refuse_difference(by_process, processes, names)
    if compare_replicas and (same := _equal_replicas(by_process, replicas)):
        raise PipelineError(
            f"replicas {same[0]} and {same[1]} were given the same data, so the second one adds nothing. With a "
            f"DataLoader, write DataLoader(dataset, batch_size=…, sampler=pipeline.sampler(dataset)); of a batch that "
            f"every process makes, give rows[pipeline.replica :: pipeline.num_replicas]. If equal data is intended, "
            f"make Pipeline(…, check_data='never')"
        )
