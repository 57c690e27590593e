"""From a buffer of weights to the manifest that announces it, bucket by bucket."""

from collections.abc import Sequence

import numpy as np

from relax.errors import WeightSyncError
from relax.types import WeightManifest
from relax.weights.digest import Buckets, Digester, manifest_digest
from relax.weights.layout import BUCKET_BYTES, Table, cut

Canary = tuple[Sequence[int], Sequence[float]]


def make_manifest(
    version: int,
    content: memoryview,
    table: Table,
    canary: Canary,
    *,
    location: str,
    transport: str = "file",
    bucket_bytes: int = BUCKET_BYTES,
) -> WeightManifest:
    """Announces `content`, which is at `location`, all at once. Blocking: hashing takes time."""
    with Digester() as digester:
        buckets = tuple(
            (start, end, digester.digest(content[start:end])) for start, end in cut(table, len(content), bucket_bytes)
        )
    return WeightManifest(
        version=version,
        transport=transport,
        location=location,
        num_bytes=len(content),
        tensors=table,
        digest=manifest_digest(len(content), table, buckets),
        canary_tokens=tuple(canary[0]),
        canary_logprobs=tuple(canary[1]),
        buckets=buckets,
    )


def check_manifest(manifest: WeightManifest) -> None:
    """Raises `WeightSyncError` that names the bucket unless the buckets follow one another over the whole buffer, and when
    buckets or table are not those of the digest."""
    version, end = manifest.version, 0
    for number, (start, stop, _) in enumerate(manifest.buckets):
        if start != end or stop <= start:
            raise WeightSyncError(
                f"version {version}: bucket {number} has bytes {start} to {stop}, wanted is one that begins at byte {end}: "
                "buckets are missing, doubled or out of order"
            )
        end = stop
    if end != manifest.num_bytes:
        raise WeightSyncError(
            f"version {version}: its {len(manifest.buckets)} buckets end at byte {end} of {manifest.num_bytes}"
        )
    digest = manifest_digest(manifest.num_bytes, manifest.tensors, manifest.buckets)
    if digest != manifest.digest:
        raise WeightSyncError(
            f"version {version}: the digest of its table and buckets is {digest}, announced was {manifest.digest}"
        )


def canary_difference(manifest: WeightManifest, logprobs: Sequence[float]) -> float:
    """How far a receiver's log-probs of the canary lie from the trainer's: the largest difference but one, NaN if one is NaN.

    But one: where a model is nearly singular, rounding alone can move the log-prob of a token a hundred times as far as those
    of others. Weights that are not what the receiver computes with, a single expert's among them, move more than one.
    """
    apart = np.abs(np.subtract(logprobs, manifest.canary_logprobs))
    return float(np.nan if np.isnan(apart).any() else np.sort(apart)[-2:][0])


def spans(buckets: Buckets) -> list[tuple[int, int]]:
    """Where buckets begin and end."""
    return [(start, end) for start, end, _ in buckets]
