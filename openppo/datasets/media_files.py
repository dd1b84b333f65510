"""Images and videos in the forms that rows and messages have; nothing is fetched."""

import base64
import binascii
import io
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from openppo.datasets.templates import shortened

UNREADABLE = ValueError, OSError, SyntaxError, Image.DecompressionBombError
"""What the functions raise for what is missing, broken or of another form."""
_TURNS = (
    "FLIP_LEFT_RIGHT",
    "ROTATE_180",
    "FLIP_TOP_BOTTOM",
    "TRANSPOSE",
    "ROTATE_270",
    "TRANSVERSE",
    "ROTATE_90",
)
"""What makes an image upright, by EXIF's orientations from 2 on."""
_NAMES = ("bytes", "image", "video", "url", "path", "image_url", "video_url")


def values_of(column: object) -> list[Any]:
    """What a column has, one or a list of them, without those that are null or empty."""
    return [one for one in (column if isinstance(column, list) else [column]) if _is_given(one)]


def _is_given(value: object) -> bool:
    if isinstance(value, dict):  # Parquet may write a missing image as a dict of nulls
        return any(map(_is_given, value.values()))
    return value is not None and not (isinstance(value, str | bytes | list) and len(value) == 0)


def given_in(part: dict[str, Any]) -> Any:
    """What a part of a content, or ``datasets`` in a dict, gives as image or video; None if it gives none."""
    given = next((part[name] for name in _NAMES if _is_given(part.get(name))), None)
    return given_in(given) if isinstance(given, dict) else given


def content_of(value: object, near: str = "") -> Any:
    """``value`` with a path, base64, a data URL or a dict replaced by the bytes that it stands for.

    A path is looked for in the working directory, then beside the file ``near``.
    """
    if isinstance(value, dict):
        return content_of(given_in(value), near)
    return _bytes_of(value, near) if isinstance(value, str) else value


def read_image(value: object, near: str = "") -> Image.Image:
    """An RGB image from bytes, base64, a path, ``datasets.Image``, PIL's or an array; ``ValueError`` for what is none.

    Upright, and on white where it is transparent, as processors of transformers lay it.
    """
    image = content_of(value, near)
    try:
        if isinstance(image, bytes | bytearray):
            image = Image.open(io.BytesIO(image))
        elif isinstance(image, np.ndarray):
            image = Image.fromarray(image)
    except (
        UnidentifiedImageError,
        TypeError,
    ) as error:  # whose messages are of a buffer's address, and of dtypes
        raise ValueError(f"{shortened(value)} is no image that PIL can read") from error
    if not isinstance(image, Image.Image):
        forms = "bytes, base64, a path, an image of datasets or PIL, or an array of bytes"
        raise ValueError(f"{shortened(image)} is no image: give {forms}")
    return _in_rgb(_upright(image))


def _upright(image: Image.Image) -> Image.Image:
    """``image``, turned; unlike ``ImageOps.exif_transpose`` it writes no EXIF, which fails for odd entries."""
    try:
        orientation = image.getexif().get(0x0112, 1)
    except SyntaxError:  # what is there is no EXIF
        return image
    is_turned = isinstance(orientation, int) and 2 <= orientation <= 8
    return image.transpose(Image.Transpose[_TURNS[orientation - 2]]) if is_turned else image


def _in_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # PIL cuts its values at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(
            f"its pixels (PIL's mode {image.mode}) have no fixed range: save it with 8 or 16 bits"
        )
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def read_frames(
    value: object, fps: float, most: int, near: str = ""
) -> tuple[list[Image.Image], float]:
    """Frames of a video, ``fps`` of each second but ``most`` at all, evenly spaced, and how many a second they are.

    ``value`` is a file in any form that an image may have, or a list of frames, of which a second has ``fps``.
    """
    value = given_in(value) if isinstance(value, dict) else value
    if isinstance(value, list):
        n = min(most, len(value))
        frames = [read_image(value[i * len(value) // n], near) for i in range(n)]
        if len({frame.size for frame in frames}) > 1:
            raise ValueError(
                f"its frames have sizes {frames[0].size} and others: give frames of one size"
            )
        return frames, fps * n / len(value)
    content = content_of(value, near)
    if not isinstance(content, bytes | bytearray):
        raise ValueError(
            f"{shortened(content)} is no video: give a path, bytes, base64, or a list of frames"
        )
    try:
        import av
    except ImportError as error:
        raise ValueError(
            "videos are decoded by PyAV: pip install 'openppo[vision]', or give lists of frames."
        ) from error
    try:
        with av.open(io.BytesIO(content), "r") as file:
            packets = [p for p in file.demux(video=0) if p.pts is not None and p.time_base]
            start = min(float((p.pts or 0) * p.time_base) for p in packets)
            length = (
                max(float(((p.pts or 0) + (p.duration or 0)) * p.time_base) for p in packets)
                - start
            )
            n = max(1, min(most, round(length * fps)))
            file.seek(0)
            frames = [
                frame.to_image().rotate(frame.rotation, expand=True)
                for frame in _chosen(file.decode(video=0), n, start, length=length)
            ]
    except (av.FFmpegError, IndexError, ValueError) as error:  # an index of a stream, or no packets
        raise OSError(f"no video that PyAV can decode ({error})") from error
    return frames, n / length if length > 0 else fps


def _chosen(frames: Iterator[Any], n: int, start: float, length: float) -> Iterator[Any]:
    """``n`` of the frames: for each part of a video that begins at ``start`` the first at its start or after it.

    ``ValueError`` without any.
    """
    taken, last = 0, None
    for last in frames:
        while taken < n and (last.time or start) - start >= taken * length / n - 1e-6:
            yield last
            taken += 1
    if last is None:
        raise ValueError("it has no frames")
    yield from [last] * (n - taken)


def thumbnail(image: Image.Image) -> str:
    """A data URL of a picture of at most 96 x 96 pixels."""
    small, file = image.copy(), io.BytesIO()
    small.thumbnail((96, 96))
    small.save(file, "JPEG", quality=70)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def _bytes_of(text: str, near: str) -> bytes:
    if re.match(r"https?://", text):
        raise ValueError(
            f"{shortened(text)} is an address, and nothing is fetched: download it, and give its path"
        )
    if text.startswith("data:"):
        return _from_base64(text.partition(",")[2])
    text = text.removeprefix("file://")
    for path in (Path(text), Path(near).parent / text, Path(near) / text):
        with suppress(OSError):  # a name that is too long is base64
            if path.is_file():
                return path.read_bytes()
    if "." in text:  # which base64 has not
        raise FileNotFoundError(f"there is no file {shortened(text)}")
    return _from_base64(text)


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except binascii.Error as error:
        raise ValueError(f"{shortened(text)} is neither a file that exists nor base64") from error


def within_pixels(image: Image.Image, least: int | None, most: int | None) -> Image.Image:
    """``image`` scaled so that it has at least and at most so many pixels; its shape stays."""
    n_pixels = image.width * image.height
    wanted = min(max(n_pixels, least or 0), most or max(n_pixels, least or 0))
    if wanted == n_pixels:
        return image
    factor, up = math.sqrt(wanted / n_pixels), wanted > n_pixels
    rounded = math.ceil if up else math.floor
    return image.resize(
        (max(1, rounded(image.width * factor)), max(1, rounded(image.height * factor)))
    )
