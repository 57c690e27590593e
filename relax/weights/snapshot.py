"""One version's weights, copied out of the trainer bucket by bucket; each is hashed while the next one is copied."""

from collections.abc import Sequence
from dataclasses import dataclass

from relax.types import WeightManifest
from relax.weights.digest import BucketDigest, manifest_digest
from relax.weights.layout import Span, Table
from relax.weights.shared_memory import BufferFile


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A copy of the weights, not yet announced; `number` counts a publisher's. `seconds`: what the trainer waited for it."""

    version: int
    number: int
    file: BufferFile
    num_bytes: int
    tensors: Table
    spans: Sequence[Span]
    digests: Sequence[BucketDigest]
    canary_tokens: tuple[int, ...]
    canary_logprobs: tuple[float, ...]
    seconds: float

    def manifest(self) -> WeightManifest:
        """What announces it. Blocking, until the last bucket is hashed."""
        buckets = tuple((start, end, digest.result()) for (start, end), digest in zip(self.spans, self.digests, strict=True))
        return WeightManifest(
            version=self.version,
            transport=self.file.transport,
            location=str(self.file.path),
            num_bytes=self.num_bytes,
            tensors=self.tensors,
            digest=manifest_digest(self.num_bytes, self.tensors, buckets),
            canary_tokens=self.canary_tokens,
            canary_logprobs=self.canary_logprobs,
            buckets=buckets,
        )

    def cancel(self) -> None:
        """It will not be announced."""
        for digest in self.digests:
            digest.cancel()
