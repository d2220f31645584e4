"""Random views of a batch of images: torchvision's transforms, batched, with parameters drawn per image.

``torch.rand`` → ``parameters_from_uniforms`` → ``apply_view`` → ``normalise``. Shapes never depend on values and
nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from interclr import kernels
from interclr.data.colour import LUMA, jitter, per_image, rotate_hue, solarise, to_grey
from interclr.data.view_parameters import ATTEMPTS, View, ViewParameters, draw_uniforms, parameters_from_uniforms
from interclr.types import Batch, Images, UserError

SMALL_BATCH = 2**22  # bytes of pixels: below, views of one kind are made together, to save on the number of operations
SMALL_VIEW, SMALL_BLUR = 64, 9  # pixels: views and blurs that ``kernels/views.py`` takes
CHUNK_ELEMENTS = 2**25  # source pixels turned into floats at a time (128 MB): bounds memory with large canvases


def resize_weights(canvas: int, start: Tensor, length: Tensor, scale: Tensor, output: Tensor) -> Tensor:
    """Antialiased bilinear resampling of one axis as a matrix (B, S, canvas), the same as ``F.interpolate``'s.

    Output pixel ``output[b, s]`` (B, S) of image ``b`` is centred at ``scale · (output + ½)`` in the window
    ``[start, start + length)`` of the canvas; pixels outside it get no weight. The other tensors are (B, 1).
    """
    source = torch.arange(canvas, device=start.device, dtype=start.dtype) - start  # (B, canvas)
    outside = (source < 0) | (source >= length)
    source = (source + 0.5).masked_fill_(outside, 1e9)  # beyond the reach of any filter
    centre = scale * (output + 0.5)  # (B, S)
    reach = scale.clamp_min(1)  # the triangle widens when shrinking
    weights = (
        (source[:, None] - centre[:, :, None]).mul_(per_image(1 / reach[:, 0])).abs_().neg_().add_(1).clamp_min_(0)
    )
    return weights.div_(weights.sum(2, keepdim=True))


def resample(image: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """``rows @ image @ columnsᵀ`` for each channel: (B, 3, H, W), (B, S, H), (B, S, W) → (B, 3, S, S).

    The channels lie side by side, so that both products are plain batched ones without repeating the matrices. The
    result's channel planes are outermost in memory, so each is contiguous, which suits the colour operations.
    """
    batch, channels, height, width = image.shape
    size = rows.shape[1]
    beside = image.new_empty((batch, height, channels, width), dtype=rows.dtype).copy_(image.transpose(1, 2))
    mixed = torch.bmm(rows, beside.view(batch, height, channels * width))  # (B, S, 3W)
    mixed = torch.bmm(mixed.view(batch, size * channels, width), columns.transpose(1, 2))  # (B, 3S, S)
    return mixed.view(batch, size, channels, size).permute(2, 0, 1, 3).contiguous().transpose(0, 1)


def _resize(
    pixels: Tensor,
    window: tuple[Tensor, ...],
    scale: tuple[Tensor, Tensor],
    output: tuple[Tensor, Tensor],
    product: torch.dtype | None = None,
) -> Tensor:
    """Resample the ``window`` (top, left, height, width) of each image, in chunks of a fixed number of images.

    Where the canvas is not larger than the output, no ``scale`` is above 1.
    """
    real = pixels.dtype if pixels.is_floating_point() else torch.float32
    product = product or real
    canvas_height, canvas_width = pixels.shape[2:]
    if pixels.device.type == "cpu" and product == real and max(canvas_height, canvas_width) <= output[0].shape[1]:
        image = _enlarge(pixels.to(real), window, scale, output)
        return image if pixels.is_floating_point() else image.mul_(1 / 255)
    most = CHUNK_ELEMENTS if product == real else 16 * CHUNK_ELEMENTS  # on a GPU: one chunk, one set of kernels
    chunk = max(1, most // (3 * canvas_height * canvas_width))
    # A compiler would make a new program for every length of a chunk; that all fit into one is one program.
    slices = [slice(None)] if len(pixels) <= chunk else [slice(i, i + chunk) for i in range(0, len(pixels), chunk)]
    parts = []
    for part in slices:
        top, left, height, width = (value[part, None].to(real) for value in window)
        vertical, horizontal = (value[part, None].to(real) for value in scale)
        rows = resize_weights(canvas_height, top, height, vertical, output[0][part].to(real))
        columns = resize_weights(canvas_width, left, width, horizontal, output[1][part].to(real))
        parts.append(resample(pixels[part], rows.to(product), columns.to(product)).to(real))
    image = parts[0] if len(parts) == 1 else torch.cat([part.transpose(0, 1) for part in parts], 1).transpose(0, 1)
    return image if pixels.is_floating_point() else image.mul_(1 / 255)


def _enlarge(
    pixels: Tensor, window: tuple[Tensor, ...], scale: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]
) -> Tensor:
    """The same where no image shrinks: then a pixel mixes four, which takes a CPU half the time of the matrices."""
    places = []  # (B, S) down and across, −1 .. 1 over the canvas
    for canvas, start, length, step, steps in zip(pixels.shape[2:], window[:2], window[2:], scale, output, strict=True):
        place = (step[:, None] * (steps + 0.5) - 0.5).clamp_min_(0).minimum(length[:, None] - 1)  # within the window
        places.append((place + (start[:, None] + 0.5)) * (2 / canvas) - 1)
    grid = torch.stack(torch.broadcast_tensors(places[1][:, None, :], places[0][:, :, None]), 3)
    return functional.grid_sample(pixels, grid, padding_mode="border", align_corners=False)


def blur_matrix(sigma: Tensor, size: int, kernel: int) -> Tensor:
    """Gaussian blur of one axis with reflected borders as a matrix (B, S, S); the identity where ``sigma`` is 0."""
    reach = kernel // 2
    taps = torch.arange(reach + 1, device=sigma.device)  # distances
    # The floor turns 0 into a delta exactly: exp(−1 / (2·10⁻⁴)) underflows.
    weight = torch.exp(taps.square() / (-2 * sigma.square().clamp_min(1e-4)[:, None]))  # (B, reach + 1)
    weight = weight / (2 * weight.sum(1, keepdim=True) - weight[:, :1])
    here = torch.arange(size, device=sigma.device)
    there = here[:, None]  # of the result
    last = size - 1
    # Pixel j is seen at j and, past either border but not at it, at its mirror images −j and 2·last − j.
    far = size + kernel  # a distance that no tap has
    seen = (here, (-here).masked_fill(here == 0, -far), (2 * last - here).masked_fill(here == last, last + far))
    distances = torch.stack([(there - position).abs() for position in seen])  # (3, S, S)
    count = (distances == taps[:, None, None, None]).sum(1).to(sigma.dtype)  # (reach + 1, S, S)
    return (weight @ count.flatten(1)).view(-1, size, size)


def apply_view(
    pixels: Tensor,
    parameters: ViewParameters,
    output_size: int,
    blur_kernel: int = 3,
    product: torch.dtype | None = None,
) -> Tensor:
    """(B, 3, H, W) bytes, or floats in [0, 1] → (B, 3, S, S) floats in [0, 1].

    ``product`` is the precision of the factors in the matrix products that crop, resize and blur; None: that of the
    images. In float16, which holds a byte exactly and eleven bits of a weight, the result is off by about 1/8 of a grey
    level; colours stay in float32.
    """
    window = (parameters.top, parameters.left, parameters.height, parameters.width)
    forward = torch.arange(output_size, device=pixels.device).expand(len(pixels), -1)  # (B, S)
    across = torch.where(parameters.flip[:, None], output_size - 1 - forward, forward)
    real = pixels.dtype if pixels.is_floating_point() else torch.float32
    scale = (parameters.height.to(real) / output_size, parameters.width.to(real) / output_size)
    image = _resize(pixels, window, scale, (forward, across), product)
    # Numbers drawn in single precision may meet double-precision images, as in the tests.
    if parameters.factor is not None and parameters.order is not None:
        hue = None if parameters.hue is None else parameters.hue.to(real)
        image = jitter(image, parameters.factor.to(real), hue, parameters.order, parameters.blends)
    elif parameters.hue is not None:
        image = rotate_hue(image, parameters.hue.to(real))
    if parameters.grey is not None:
        image = to_grey(image, parameters.grey)
    if parameters.blur_sigma is not None:
        matrix = blur_matrix(parameters.blur_sigma.to(real), output_size, blur_kernel)
        matrix = matrix.to(product or real)
        image = resample(image, matrix, matrix).to(real)
    if parameters.solarise is not None:
        image = solarise(image, parameters.solarise)
    return image


def normalise(image: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype) -> Tensor:
    """(B, 3, S, S) in ``dtype``. On a GPU channels last, as convolutions want them there, and channel by channel with
    plain numbers, which need no copy to the device.
    """
    if image.device.type == "cpu":
        centres, spreads = (torch.tensor(values, dtype=image.dtype)[:, None, None] for values in (mean, std))
        return (image.contiguous() - centres).div_(spreads).to(dtype)
    planes = zip(image.unbind(1), mean, std, strict=True)
    scaled = [(plane - centre).div_(spread).to(dtype) for plane, centre, spread in planes]
    return torch.stack(scaled, 3).permute(0, 3, 1, 2)


def largest_side(output_size: int) -> int:
    """How large an image is worth keeping for views of this size: 512 for 224. Larger ones are shrunk when read."""
    return 16 * output_size // 7


def image_sizes(images: Images) -> Tensor:
    """(B, 2) int64 heights and widths, also when every image fills its canvas."""
    if images.size is not None:
        return images.size
    height, width = images.pixels.shape[2:]
    full = torch.ones((len(images), 1), dtype=torch.int64, device=images.pixels.device)
    return torch.cat((full * height, full * width), 1)


class Views:
    """Makes a ``Batch`` of normalised random views from a batch of images, on the device the images are on.

    ``dtype`` is that of the views; ``product`` see :func:`apply_view`. ``compiled`` fuses the dozens of passes over the
    pixels into a few: worth it on a GPU, after a quarter of a minute to compile.
    """

    def __init__(
        self,
        views: Sequence[View],
        output_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        dtype: torch.dtype = torch.float32,
        product: torch.dtype | None = None,
        compiled: bool = False,
    ) -> None:
        for view in views:
            if view.blur > 0 and view.kernel(output_size) // 2 >= output_size:
                raise UserError(f"blur_kernel {view.kernel(output_size)} is too wide for views of {output_size} pixels")
        self.views, self.output_size, self.mean, self.std, self.dtype = tuple(views), output_size, mean, std, dtype
        self.product = product
        # Equal views share one function, so that it is compiled once.
        made = {view: self._maker(view) for view in self.views}
        self._make = {view: torch.compile(make) if compiled else make for view, make in made.items()}
        self._small = {view: self._small_maker(view) for view in self.views}

    def _maker(self, view: View) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        output_size, kernel, product, mean, std = (
            self.output_size, view.kernel(self.output_size), self.product, tuple(self.mean), tuple(self.std),
        )  # fmt: skip
        dtype = self.dtype

        def make(pixels: Tensor, size: Tensor, uniforms: Tensor) -> Tensor:
            parameters = parameters_from_uniforms(view, uniforms, size)
            return normalise(apply_view(pixels, parameters, output_size, kernel, product), mean, std, dtype)

        return make

    def _small_maker(self, view: View) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The same by kernels that hold an image at a time; there may be more rows of numbers than of images."""

        def make(pixels: Tensor, size: Tensor, uniforms: Tensor) -> Tensor:
            from interclr.kernels.views import Kind, make_views

            strengths = (view.brightness, view.contrast, view.saturation)
            kind = Kind(
                view.crop_scale, view.crop_ratio, view.flip, view.jitter, strengths, view.hue, view.grey, view.blur,
                view.blur_sigma, view.kernel(self.output_size), view.solarise,
            )  # fmt: skip
            luma = (LUMA[0], LUMA[1], LUMA[2])
            line = (luma, self.mean, self.std, self.dtype)
            return make_views(pixels, size, uniforms, ATTEMPTS, kind, self.output_size, *line)

        return make

    def _are_small(self, pixels: Tensor) -> bool:
        blurs = (view.kernel(self.output_size) for view in self.views if view.blur > 0)
        fits = max(pixels.shape[2:]) <= self.output_size <= SMALL_VIEW and max(blurs, default=0) <= SMALL_BLUR
        return fits and pixels.dtype == torch.uint8 and kernels.usable(pixels)

    @torch.no_grad()
    def __call__(self, images: Images, generator: torch.Generator, total: int | None = None, first: int = 0) -> Batch:
        """``images`` are rows ``first`` onwards of a global batch of ``total``; ``generator`` is on their device."""
        size = image_sizes(images)
        uniforms = [draw_uniforms(size, generator, total, first) for _ in self.views]
        # Autocast would run the resampling in bfloat16, which has not even a pixel's 8 bits.
        with torch.autocast(images.pixels.device.type, enabled=False):
            pixels, count = images.pixels.contiguous(), len(self.views)
            small = self._are_small(pixels)
            make = self._small if small else self._make
            if len(make) < count and (small or pixels.numel() <= SMALL_BATCH):
                if not small:
                    pixels, size = pixels.repeat(count, 1, 1, 1), size.repeat(count, 1)
                made = make[self.views[0]](pixels, size, torch.cat(uniforms)).chunk(count)
            else:
                made = tuple(
                    make[view](pixels, size, numbers) for view, numbers in zip(self.views, uniforms, strict=True)
                )
        return Batch(images.index, made, images.label)


@torch.no_grad()
def centre_crop(
    images: Images,
    output_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    resize_ratio: float = 224 / 256,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The evaluation transform: shorter side to ``output_size / resize_ratio``, then the central square, normalised.

    An image that has the output size already stays as it is (CIFAR is not cropped), whatever else is in the batch.
    """
    if not 0 < resize_ratio <= 1:
        raise ValueError(
            f"resize_ratio must be in (0, 1], not {resize_ratio}: the crop cannot exceed the resized image"
        )
    pixels, size = images.pixels, image_sizes(images)
    shorter = round(output_size / resize_ratio)
    resized = shorter * size // size.amin(1, keepdim=True)  # (B, 2)
    resized = resized.masked_fill((size == output_size).all(1, keepdim=True), output_size)
    offset = ((resized - output_size) / 2).round()  # halves to even, as Python's round in torchvision
    steps = torch.arange(output_size, device=pixels.device)
    scale = size.to(torch.float32) / resized
    zero = torch.zeros_like(size[:, 0])
    with torch.autocast(pixels.device.type, enabled=False):
        window = (zero, zero, size[:, 0], size[:, 1])
        output = (steps + offset[:, :1], steps + offset[:, 1:])
        image = _resize(pixels, window, (scale[:, 0], scale[:, 1]), output)
    return normalise(image, mean, std, dtype)
