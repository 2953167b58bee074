"""Recordings of requests: from files or samples to one channel at the rate that models hear.

PCM WAV files are read by the standard library, all others by `soundfile`, other rates are resampled
by `soxr`; both come with the extra `audio` and are imported when they are needed.
"""

import io
import os
import wave
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inkrt.errors import RequestError, UsageError

# A file's bytes or path, or samples with their rate: [n] or [n, channels], floats from -1 to 1 or
# integers that fill their type.
RecordingSource = bytes | str | os.PathLike[str] | tuple[object, int]

RATE = 16_000
MAX_SECONDS = 600
MAX_FILE_BYTES = 512 << 20
_RATES = range(1_000, 768_001)
_INSTALL = "install it with: pip install 'inkrt[audio]'"


def read_recording(
    source: RecordingSource, *, name: str = "audio[0]", param: str = "audio"
) -> NDArray[np.float32]:
    """Samples of a recording, float32 [n], n > 0, one channel at RATE.

    Channels are averaged.

    Args:
        source: see `RecordingSource`.
        name: of the recording in messages.
        param: the request's field that it came in.

    Raises:
        RequestError: it cannot be read, is none, or is empty or longer than MAX_SECONDS.
        UsageError: it needs a library that is not installed.
    """
    reader = _Reader(name, param)
    if isinstance(source, tuple):
        samples, rate = reader.samples(source)
    else:
        samples, rate = reader.decode(reader.content(source))
    if not isinstance(rate, int) or rate not in _RATES:
        raise reader.refusal(
            f"has {rate!r} samples a second, {_RATES.start} to {_RATES.stop - 1} can be read"
        )
    if len(samples) == 0:
        raise reader.refusal("has no samples; leave it out")
    reader.require_length(len(samples), rate)
    if not np.isfinite(samples).all():
        raise reader.refusal("has samples that are not finite")
    mono = samples.mean(axis=1, dtype=np.float32)
    return mono if rate == RATE else reader.resampled(mono, rate)


class _Reader:
    """Steps of reading one recording; its errors name it."""

    def __init__(self, name: str, param: str) -> None:
        self._name = name
        self._param = param

    def refusal(self, what: str) -> RequestError:
        return RequestError(f"{self._name} {what}", param=self._param)

    def require_length(self, num_samples: int, rate: int) -> None:
        if num_samples > MAX_SECONDS * rate:
            raise self.refusal(
                f"takes {num_samples / rate:.1f} s, models hear {MAX_SECONDS} at most; cut it"
            )

    def require_size(self, size: int) -> None:
        if size > MAX_FILE_BYTES:
            raise self.refusal(
                f"has {size} bytes, at most {MAX_FILE_BYTES} are read; cut or compress it"
            )

    def content(self, source: bytes | str | os.PathLike[str]) -> bytes:
        """Content of a file."""
        if isinstance(source, bytes):
            self.require_size(len(source))
            return source
        try:
            self.require_size(Path(source).stat().st_size)
            return Path(source).read_bytes()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise self.refusal(
                f"cannot be read from {os.fspath(source)!r}: {reason}; give another path"
            ) from None
        except TypeError:
            raise self.refusal(
                f"is of type {type(source).__name__}, it must be bytes, a path, or samples and "
                f"their rate as a pair"
            ) from None

    def samples(self, source: tuple[object, int]) -> tuple[NDArray[np.float32], int]:
        """Samples that a caller has decoded, float32 [n, channels], and their rate."""
        if len(source) != 2:
            raise self.refusal("is a tuple, but no pair of samples and their rate")
        values, rate = np.asarray(source[0]), source[1]
        if values.dtype.kind not in "iuf" or values.ndim not in (1, 2) or 0 in values.shape[1:]:
            raise self.refusal(
                f"has samples of {values.dtype} {list(values.shape)}, they must be numbers [n] or "
                f"[n, channels]"
            )
        if values.dtype.kind == "u":
            raise self.refusal(f"has samples of {values.dtype}; give signed integers or floats")
        scale = 1.0 if values.dtype.kind == "f" else 2.0 ** (8 * values.dtype.itemsize - 1)
        floats = (values / scale).astype(np.float32)
        return floats.reshape(len(floats), -1), rate

    def decode(self, data: bytes) -> tuple[NDArray[np.float32], int]:
        """Samples of an encoded recording, float32 [n, channels], and their rate."""
        try:
            with wave.open(io.BytesIO(data)) as file:
                return self._pcm(file), file.getframerate()
        except (wave.Error, EOFError) as error:
            reason = str(error) or "it ends early"
        try:
            import soundfile
        except (ModuleNotFoundError, OSError):
            raise UsageError(
                f"{self._name} is no PCM WAV file ({reason}); other formats need soundfile, "
                f"{_INSTALL}"
            ) from None
        try:
            with soundfile.SoundFile(io.BytesIO(data)) as file:
                rate = int(file.samplerate)
                # Before decoding: seconds of silence take next to no bytes.
                self.require_length(file.frames, rate)
                values = file.read(dtype="float32", always_2d=True)
        except (soundfile.SoundFileError, TypeError, ValueError) as error:
            reason = str(getattr(error, "error_string", error)).rstrip(". ")
            raise self.refusal(
                f"is damaged or of no format that is read ({reason}); save it as WAV"
            ) from None
        return values, rate

    def _pcm(self, file: wave.Wave_read) -> NDArray[np.float32]:
        width, channels = file.getsampwidth(), file.getnchannels()
        wanted = file.getnframes()
        data = np.frombuffer(file.readframes(wanted), np.uint8)
        if len(data) < wanted * width * channels:
            raise self.refusal(
                f"is truncated: {len(data)} of {wanted * width * channels} bytes of samples are "
                f"there; save or send it again"
            )
        if width == 1:  # of all widths, this one alone is unsigned
            values = ((data.astype(np.float32) - 128) / 128).astype(np.float32)
        else:
            # Little-endian, into the upper bytes of 32 bits.
            words = np.zeros((len(data) // width, 4), np.uint8)
            words[:, 4 - width :] = data.reshape(-1, width)
            values = (words.view("<i4")[:, 0] / 2.0**31).astype(np.float32)
        samples: NDArray[np.float32] = values.reshape(-1, channels)
        return samples

    def resampled(self, samples: NDArray[np.float32], rate: int) -> NDArray[np.float32]:
        """Samples at RATE; at least one."""
        try:
            import soxr
        except ModuleNotFoundError:
            raise UsageError(
                f"{self._name} has {rate} samples a second, models hear {RATE}; resampling needs "
                f"soxr, {_INSTALL}"
            ) from None
        values: NDArray[np.float32] = soxr.resample(samples, rate, RATE)
        return values if len(values) else np.zeros(1, np.float32)
