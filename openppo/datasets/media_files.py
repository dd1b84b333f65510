"""Images and videos in all forms of rows and messages; nothing is fetched."""

import base64
import binascii
import io
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from openppo.datasets.templates import shortened

UNREADABLE = ValueError, OSError, SyntaxError, Image.DecompressionBombError
"""Errors of these functions for a value that is missing, broken or of another form."""
_TURNS = (
    "FLIP_LEFT_RIGHT",
    "ROTATE_180",
    "FLIP_TOP_BOTTOM",
    "TRANSPOSE",
    "ROTATE_270",
    "TRANSVERSE",
    "ROTATE_90",
)
"""Transpositions that make an image upright, by EXIF's orientations from 2 on."""
_NAMES = ("bytes", "image", "video", "url", "path", "image_url", "video_url")
"""Keys of an image or video in a dict, the first of which counts."""


def values_of(column: object) -> list[Any]:
    """Values of a column that holds one or a list of them, without those that are null or empty."""
    values = column if isinstance(column, list) else [column]
    return [value for value in values if not _is_missing(value)]


def _is_missing(value: object) -> bool:
    # Parquet may write a missing image as a dict of nulls.
    if isinstance(value, dict):
        return all(map(_is_missing, value.values()))
    return value is None or (isinstance(value, str | bytes | list) and len(value) == 0)


def given_in(part: dict[str, Any]) -> Any:
    """Find the image or video in a part of a content, or in a dict of ``datasets``; None without one."""
    values = (part[name] for name in _NAMES if not _is_missing(part.get(name)))
    value = next(values, None)
    return given_in(value) if isinstance(value, dict) else value


def content_of(value: object, near: str = "") -> Any:
    """Replace a path, base64, a data URL or a dict by the bytes that it stands for.

    A path is looked for in the working directory, then beside the file ``near``.
    """
    if isinstance(value, dict):
        return content_of(given_in(value), near)
    if isinstance(value, str):
        return _bytes_of(value, near)
    return value


def read_image(value: object, near: str = "") -> Image.Image:
    """Read an RGB image from bytes, base64, a path, ``datasets.Image``, PIL's or an array.

    It is turned upright, and laid on white where it is transparent, as processors of transformers do.
    Raises ``ValueError`` for any other value.
    """
    image = content_of(value, near)

    try:
        if isinstance(image, bytes | bytearray):
            image = Image.open(io.BytesIO(image))
        elif isinstance(image, np.ndarray):
            image = Image.fromarray(image)
    # Messages of these errors have a buffer's address, or dtypes.
    except (UnidentifiedImageError, TypeError) as error:
        raise ValueError(f"{shortened(value)} is no image that PIL can read") from error

    if not isinstance(image, Image.Image):
        forms = "bytes, base64, a path, an image of datasets or PIL, or an array of bytes"
        raise ValueError(f"{shortened(image)} is no image: give {forms}")
    return _in_rgb(_upright(image))


def _upright(image: Image.Image) -> Image.Image:
    """Turn ``image`` upright; ``ImageOps.exif_transpose`` would also write EXIF, which fails for odd entries."""
    try:
        orientation = image.getexif().get(0x0112, 1)
    except SyntaxError:  # no EXIF
        return image
    if not isinstance(orientation, int) or not 2 <= orientation <= 8:
        return image
    turn = Image.Transpose[_TURNS[orientation - 2]]
    return image.transpose(turn)


def _in_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # PIL cuts its values at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(
            f"its pixels (PIL's mode {image.mode}) have no fixed range: save it with 8 or 16 bits"
        )
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def read_frames(
    value: object, fps: float, max_frames: int, near: str = ""
) -> tuple[list[Image.Image], float]:
    """Read evenly spaced frames of a video, at most ``max_frames``; return them and their rate per second.

    ``value`` is a file in any form that an image may have, of which ``fps`` frames of each second are read, or a list
    of frames with that rate.
    """
    if isinstance(value, dict):
        value = given_in(value)
    if isinstance(value, list):
        return _read_list_of_frames(value, fps, max_frames, near=near)

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
            start, end = _times(file.demux(video=0))
            length = end - start
            n = max(1, min(max_frames, round(length * fps)))
            file.seek(0)
            frames = []
            for frame in _evenly_spaced(file.decode(video=0), n, start, length=length):
                frames.append(frame.to_image().rotate(frame.rotation, expand=True))
    except (av.FFmpegError, IndexError, ValueError) as error:  # an index of a stream, or no packets
        raise OSError(f"no video that PyAV can decode ({error})") from error
    return frames, n / length if length > 0 else fps


def _read_list_of_frames(
    values: list[Any], fps: float, max_frames: int, near: str
) -> tuple[list[Image.Image], float]:
    n = min(max_frames, len(values))
    frames = []
    for number in range(n):
        value = values[number * len(values) // n]
        frames.append(read_image(value, near))
    if len({frame.size for frame in frames}) > 1:
        raise ValueError(
            f"its frames have sizes {frames[0].size} and others: give frames of one size"
        )
    return frames, fps * n / len(values)


def _times(packets: Iterable[Any]) -> tuple[float, float]:
    """Start and end of a video in seconds; ``ValueError`` if no packet has a time."""
    starts = []
    ends = []
    for packet in packets:
        if packet.pts is not None and packet.time_base:
            starts.append(float(packet.pts * packet.time_base))
            ends.append(float((packet.pts + (packet.duration or 0)) * packet.time_base))
    return min(starts), max(ends)


def _evenly_spaced(frames: Iterator[Any], n: int, start: float, length: float) -> Iterator[Any]:
    """Choose ``n`` evenly spaced frames of a video that begins at ``start``.

    They are the first in or after each of ``n`` equal parts. Raises ``ValueError`` if there are no frames.
    """
    n_chosen = 0
    last = None
    for frame in frames:
        last = frame
        time = (frame.time or start) - start
        while n_chosen < n and time >= n_chosen * length / n - 1e-6:
            yield frame
            n_chosen += 1
    if last is None:
        raise ValueError("it has no frames")
    for _ in range(n - n_chosen):
        yield last


def thumbnail(image: Image.Image) -> str:
    """Data URL of ``image``, scaled down to at most 96 x 96 pixels."""
    small = image.copy()
    small.thumbnail((96, 96))
    file = io.BytesIO()
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
    beside = Path(near)
    for path in (Path(text), beside.parent / text, beside / text):
        # A name that is too long is base64.
        with suppress(OSError):
            if path.is_file():
                return path.read_bytes()
    # Base64 has no dots.
    if "." in text:
        raise FileNotFoundError(f"there is no file {shortened(text)}")
    return _from_base64(text)


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except binascii.Error as error:
        raise ValueError(f"{shortened(text)} is neither a file that exists nor base64") from error


def within_pixels(
    image: Image.Image, min_pixels: int | None, max_pixels: int | None
) -> Image.Image:
    """Scale ``image`` to at least ``min_pixels`` and at most ``max_pixels``; its shape stays."""
    n_pixels = image.width * image.height
    n_wanted = max(n_pixels, min_pixels or 0)
    if max_pixels:
        n_wanted = min(n_wanted, max_pixels)
    if n_wanted == n_pixels:
        return image

    factor = math.sqrt(n_wanted / n_pixels)
    rounded = math.ceil if n_wanted > n_pixels else math.floor
    width = max(1, rounded(image.width * factor))
    height = max(1, rounded(image.height * factor))
    return image.resize((width, height))
