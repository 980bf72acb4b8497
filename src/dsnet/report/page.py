"""Self-contained HTML pages: styles, images and charts are inline, so that one file is the whole report."""

from __future__ import annotations

import base64
import html
import struct
import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dsnet.errors import printable

__all__ = [
    "bar_chart",
    "command",
    "escape",
    "html_table",
    "image_tag",
    "notes",
    "page",
    "png_bytes",
]

_STYLE = """
:root { color-scheme: light dark;
  --ink: #1b1f24; --soft: #59636e; --line: #d1d9e0; --bar: #2f6fdb; --back: #fff; --shade: #0006 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --bar: #5b93f0; --back: #0d1117;
  --shade: #fff6 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 4rem; color: var(--ink);
  background: var(--back); font: 16px/1.55 system-ui, sans-serif }
h1 { font-size: 1.6rem; line-height: 1.2 } h2 { font-size: 1.15rem; margin-top: 2.5rem }
h1, h2, p, li, figcaption { overflow-wrap: anywhere }
p, figcaption { color: var(--soft) } p strong { color: var(--ink) } figure { margin: 1rem 0 }
.bars { --room: 70%; display: grid; grid-template-columns: max-content 1fr; gap: .3rem .7rem;
  font-size: .85rem; color: var(--soft) }
.bars span { text-align: right }
.bars div { display: flex; align-items: center; gap: .5rem; white-space: nowrap }
.bars i { background: var(--bar); height: 1rem; border-radius: 2px }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 1.2rem 0 .3rem; padding: .6rem .8rem;
  border-radius: 6px; border: 1px solid var(--line) }
pre + p { margin-top: 0 } .notes { border-left: 4px solid #d9480f; padding: .1rem 0 .1rem 1rem }
svg { display: block; max-width: 46rem; width: 100% } .narrow { display: none }
.wide { overflow-x: auto; background: /* shadows on sides with hidden columns */
  linear-gradient(to right, var(--back) 40%, transparent) 0 0 / 3rem 100% no-repeat local,
  linear-gradient(to left, var(--back) 40%, transparent) 100% 0 / 3rem 100% no-repeat local,
  linear-gradient(to right, var(--shade), transparent) 0 0 / 1rem 100% no-repeat scroll,
  linear-gradient(to left, var(--shade), transparent) 100% 0 / 1rem 100% no-repeat scroll }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(5.5rem, 1fr)); gap: .75rem }
.grid figure { margin: 0 } .grid img { width: 100%; image-rendering: pixelated; border-radius: 4px }
.grid figcaption { font-size: .8rem; text-align: center }
table { border-collapse: separate; border-spacing: 0; width: 100% }
td, th { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid var(--line) }
td:first-child, th:first-child { text-align: left }
@media (max-width: 37.5rem) {
  .roomy { display: none } .narrow { display: block } .narrow svg { max-width: 30rem }
  td, th { white-space: nowrap }
  td:first-child, th:first-child { position: sticky; left: 0; background: var(--back);
    border-right: 1px solid var(--line); white-space: normal; min-width: 4rem; max-width: 8.5rem }
  .bars { --room: 58%; grid-template-columns: 1fr; gap: .1rem }
  .bars span { text-align: left; margin-top: .4rem } }
"""


def escape(text: str) -> str:
    """Escape text for HTML; control characters and names that are not UTF-8 become visible escapes."""
    return html.escape(printable(text))


def page(title: str, *parts: str) -> str:
    """Build a page from parts of HTML."""
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def notes(texts: Sequence[str]) -> str:
    """Build a marked list of warnings under a heading; empty if there are none."""
    marked = "".join(f"<p>{escape(text)}</p>" for text in texts)
    return f'<h2>Look at this first</h2>\n<div class="notes">{marked}</div>' if texts else ""


def command(text: str, explanation: str) -> str:
    """Build a shell command with a sentence on what it does."""
    return f"<pre><code>{escape(text)}</code></pre><p>{escape(explanation)}</p>"


def bar_chart(labels: Sequence[str], values: Sequence[float], captions: Sequence[str]) -> str:
    """Build horizontal bars with a label on the left and a caption on the right."""
    largest = max(max(values), 1e-12)
    rows = (
        f"<span>{escape(label)}</span>"
        f'<div><i style="width:calc({value / largest:.3f} * var(--room))"></i>{escape(caption)}</div>'
        for label, value, caption in zip(labels, values, captions, strict=True)
    )
    return f'<div class="bars">{"".join(rows)}</div>'


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Build a table that scrolls sideways where it is wider than the page; cells are plain text."""

    def line(kind: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{kind}>{escape(cell)}</{kind}>' for cell in cells)}</tr>"

    body = "".join([line("th", header), *(line("td", row) for row in rows)])
    return f'<div class="wide" tabindex="0"><table>{body}</table></div>'


def png_bytes(image: Tensor) -> bytes:
    """Encode an image [3, H, W] with values in [0, 1] as a PNG file."""
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    data = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data + chunk(b"IEND", b"")


def image_tag(image: Tensor, alt: str) -> str:
    """Build an inline image from a tensor [3, H, W] with values in [0, 1]."""
    source = base64.b64encode(png_bytes(image)).decode()
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{source}">'
