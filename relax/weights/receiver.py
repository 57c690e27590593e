"""The receiving side of weight sync: from a manifest to tensors whose bytes are proven to be the published ones.

manifest: buckets, table, digest --agree?--> map a bucket -> hash it -> hand out its tensors -> unmap -> the next one
"""

from collections.abc import Iterator, Mapping

import torch

from relax.errors import WeightSyncError
from relax.types import WeightManifest
from relax.weights.digest import Digester
from relax.weights.layout import Table, by_span, views
from relax.weights.manifest import check_manifest, spans
from relax.weights.shared_memory import PublishedFile

TRANSPORTS = ("shm", "file")
_SHOWN = 3


def read_buckets(manifest: WeightManifest) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors by name, one bucket after the other, on the CPU, in the data types and shapes of the manifest. Blocking.

    They are views into a private mapping of the published file: nobody writes to it while any of them is referenced, and what
    is written into them stays here. A bucket's dictionary is emptied when the next one is asked for: who copies and lets go
    has never more than one bucket mapped. Raises `WeightSyncError` that names what disagrees: the transport, the size, the
    order of the buckets, the tensor table, or the bucket whose content is not the published one. What was handed out before
    is not proven to be complete until the iteration ends.
    """
    parts = _checked(manifest)
    with Digester() as digester, PublishedFile(manifest.location, manifest.num_bytes) as file:
        for number, part in enumerate(parts):
            tensors = _read(file, manifest, number, part, digester)
            yield tensors
            tensors.clear()


def read_weights(manifest: WeightManifest) -> Mapping[str, torch.Tensor]:
    """All tensors at once, as `read_buckets` gives them. Let them go once copied, so that their buffer is free again."""
    found: dict[str, torch.Tensor] = {}
    for tensors in read_buckets(manifest):
        found.update(tensors)
    return {name: found[name] for name in manifest.tensors}


def _checked(manifest: WeightManifest) -> list[Table]:
    """The table's part in each bucket, of a manifest that agrees with itself."""
    if manifest.transport not in TRANSPORTS:
        known = ", ".join(TRANSPORTS)
        raise WeightSyncError(
            f"version {manifest.version} is offered by the transport {manifest.transport!r}; known are {known}"
        )
    check_manifest(manifest)
    return list(by_span(manifest.tensors, spans(manifest.buckets)))


def _read(
    file: PublishedFile, manifest: WeightManifest, number: int, part: Table, digester: Digester
) -> dict[str, torch.Tensor]:
    start, end, wanted = manifest.buckets[number]
    mapping, first = file.map(start, end)
    with memoryview(mapping) as content, content[start - first : end - first] as bucket:
        digest = digester.digest(bucket)
    if digest != wanted:
        names = ", ".join(map(repr, list(part)[:_SHOWN])) + (f" and {len(part) - _SHOWN} more" if len(part) > _SHOWN else "")
        raise WeightSyncError(
            f"version {manifest.version}: bucket {number} of {len(manifest.buckets)} (bytes {start} to {end}: {names}) has the "
            f"digest {digest}, announced was {wanted}"
        )
    return views(torch.frombuffer(mapping, dtype=torch.uint8), part, first)
