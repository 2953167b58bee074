"""Encoded images: their size from the header, then their pixels.

Everything that comes out of here is upright, in sRGB's order of channels, eight bits each; color
profiles are not applied. What a file says is believed only within stated limits, and whatever goes
wrong is one `RequestError`.
"""

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from inkrt.errors import RequestError, UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

ImageSource = bytes | str | os.PathLike[str]

# Pillow reads many more; some of those run other programs.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_FILE_BYTES = 64 << 20
# Below the number from which Pillow speaks of a decompression bomb.
MAX_PIXELS = 64 << 20


class ImageFile:
    """One encoded image, of which the header is read; of an animated one the first frame.

    Args:
        source: its bytes, or the path of its file.
        name: of the image in messages, such as "images[0]".
        param: the request's field that it came in.

    Attributes:
        width: of the upright image, in pixels.
        height: likewise.

    Raises:
        RequestError: it cannot be read, is no image of FORMATS, or is over a limit.
        UsageError: Pillow is not installed.
    """

    def __init__(self, source: ImageSource, *, name: str = "image", param: str = "images") -> None:
        self._name = name
        self._param = param
        data = self._read(source)
        self._image = self._open(data)
        self.width, self.height = self._upright_size(data)

    def pixels(self) -> NDArray[np.uint8]:
        """Decode it.

        Returns:
            uint8 [height, width, 3], or [height, width, 4] with opacity if it may be transparent.

        Raises:
            RequestError: it is truncated or damaged.
        """
        from PIL import ImageOps

        try:
            upright = ImageOps.exif_transpose(self._image)
        except Exception as error:  # Pillow raises whatever its decoders meet in damaged files
            raise self._damaged(error) from error
        if upright.size != (self.width, self.height):
            raise self._damaged(ValueError("its pixels have another size than its header says"))
        return self._eight_bits(upright)

    def _read(self, source: ImageSource) -> bytes:
        if isinstance(source, bytes):
            num_bytes = len(source)
        else:
            try:
                num_bytes = Path(source).stat().st_size
            except (OSError, ValueError) as error:
                raise self._unreadable(source, error) from error
        if num_bytes > MAX_FILE_BYTES:
            raise self._refusal(
                f"has {num_bytes} bytes, at most {MAX_FILE_BYTES} are read; send a smaller one"
            )
        if isinstance(source, bytes):
            return source
        try:
            return Path(source).read_bytes()
        except OSError as error:
            raise self._unreadable(source, error) from error

    def _open(self, data: bytes) -> "Image":
        try:
            from PIL import Image, UnidentifiedImageError
        except ModuleNotFoundError as error:
            raise UsageError(
                "reading images needs Pillow; install it with: pip install 'inkrt[images]'"
            ) from error
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        except UnidentifiedImageError as error:
            raise self._refusal(
                f"is no image of a format that is read ({', '.join(FORMATS)}), or a damaged one; "
                f"convert it or save it again"
            ) from error
        except Image.DecompressionBombError as error:
            raise self._refusal(f"has over {MAX_PIXELS} pixels; send a smaller one") from error
        except Exception as error:
            raise self._damaged(error) from error
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise self._refusal(
                f"has {width} x {height} pixels, at most {MAX_PIXELS} in all are read; send a "
                f"smaller one"
            )
        if min(width, height) < 1:
            raise self._refusal(f"has {width} x {height} pixels, at least one is needed")
        if image.mode in ("I", "F"):
            raise self._refusal(
                f"has one channel of 32 bits (mode {image.mode}), of which nothing says what is "
                f"white; convert it to 8 or 16 bits"
            )
        return image

    def _upright_size(self, data: bytes) -> tuple[int, int]:
        """Width and height once the image is turned as its metadata says."""
        from PIL import ExifTags, Image

        try:
            if self._image.format == "PNG" and b"eXIf" in data:
                self._image.load()  # the metadata may stand behind the pixels
            # That of PNG files decodes the pixels to look behind them.
            exif = Image.Image.getexif(self._image)
            is_on_its_side = exif.get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
        except Exception as error:
            raise self._damaged(error) from error
        width, height = self._image.size
        # Of TIFF files Pillow gives the upright size, and upright pixels.
        is_turned = self._image.format == "TIFF" or not is_on_its_side
        return (width, height) if is_turned else (height, width)

    def _eight_bits(self, image: "Image") -> NDArray[np.uint8]:
        """Three channels, or four."""
        if image.mode.startswith("I;16"):
            return _from_sixteen_bits(image)
        mode = "RGBA" if image.has_transparency_data else "RGB"
        try:
            return np.asarray(image.convert(mode))
        except Exception as error:
            raise self._damaged(error) from error

    def _unreadable(self, source: ImageSource, error: Exception) -> RequestError:
        reason = getattr(error, "strerror", None) or error
        return self._refusal(f"cannot be read from {source!r}: {reason}; give another path")

    def _damaged(self, error: Exception) -> RequestError:
        reason = " ".join(str(error).split()) or type(error).__name__
        return self._refusal(f"is damaged or incomplete ({reason}); save or send it again")

    def _refusal(self, what: str) -> RequestError:
        return RequestError(f"{self._name} {what}", param=self._param)


def _from_sixteen_bits(image: "Image") -> NDArray[np.uint8]:
    """Greyscale of 16 bits, which Pillow's own conversion would cut off at 255."""
    values = np.asarray(image).astype(np.uint32)
    grey = ((values * 255 + 32767) // 65535).astype(np.uint8)
    channels = [grey] * 3
    transparent = image.info.get("transparency")
    if transparent is not None:
        channels.append(np.where(values == transparent, 0, 255).astype(np.uint8))
    return np.stack(channels, axis=-1)
