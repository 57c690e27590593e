"""The receiving side of weight sync: from a manifest to tensors whose bytes are proven to be the published ones."""

from collections.abc import Mapping

import torch

from relax.errors import WeightSyncError
from relax.types import WeightManifest
from relax.weights.digest import content_digest
from relax.weights.layout import views
from relax.weights.shared_memory import open_private

TRANSPORTS = ("shm", "file")


def read_weights(manifest: WeightManifest) -> Mapping[str, torch.Tensor]:
    """Tensors by name, on the CPU, in the data types and shapes of the manifest. Blocking: hashing takes time.

    They are views into a private mapping of the published file: nobody writes to it while any of them is referenced, and what
    is written into them stays here. Let them go once copied, so that the publisher can use its buffer again. Raises
    `WeightSyncError` that names what disagrees: the transport, the size, the tensor table or the content.
    """
    version = manifest.version
    if manifest.transport not in TRANSPORTS:
        known = ", ".join(TRANSPORTS)
        raise WeightSyncError(f"version {version} is offered by the transport {manifest.transport!r}; known are {known}")
    mapping = open_private(manifest.location, manifest.num_bytes)
    tensors = views(torch.frombuffer(mapping, dtype=torch.uint8), manifest.tensors)
    with memoryview(mapping) as content:
        digest = content_digest(content, manifest.tensors)
    if digest != manifest.digest:
        raise WeightSyncError(f"version {version}: the content's digest is {digest}, announced was {manifest.digest}")
    return tensors
