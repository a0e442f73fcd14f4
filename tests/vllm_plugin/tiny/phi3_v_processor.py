"""Processor of a tiny Phi-3 Vision, copied beside its weights: images become crops of one size.

It has the attributes and outputs that vLLM reads of the published one, which comes with the model
and is read with `--trust-remote-code`. It chooses crops in a simpler way. This file stands alone.
"""

import numpy as np
import torch
from transformers import BatchFeature, ProcessorMixin

CROP_SIDE = 336
"""Pixels. vLLM's encoder has this size and no other."""

CROP_TOKENS_A_SIDE = 12
"""A crop has 24 by 24 patches, and four of these become one token."""


class Phi3VProcessor(ProcessorMixin):
    """Cut images into at most `num_crops` crops, behind an overview of the whole image.

    Attributes:
        img_tokens: What stands for each image of a prompt in its text.
    """

    def __init__(self, tokenizer=None, num_crops=1, **_):
        super().__init__(tokenizer)
        self.num_crops = num_crops
        self.img_tokens = [f"<|image_{number}|>" for number in range(1, 101)]

    def _grid(self, width, height):
        """Get how many rows and columns of crops an image of so many pixels has."""
        if width >= height:
            return 1, max(1, min(width // CROP_SIDE, self.num_crops))
        return max(1, min(height // CROP_SIDE, self.num_crops)), 1

    def calc_num_image_tokens_from_image_size(self, width, height):
        """Count an image's tokens: of its crops and overview, a line end each row, one between."""
        rows, columns = self._grid(width, height)
        side = CROP_TOKENS_A_SIDE
        return rows * side * (columns * side + 1) + 1 + side * (side + 1)

    def _crops(self, image):
        """Get the overview and the crops of an image, [1 + crops, 3, side, side], and its size."""
        rows, columns = self._grid(*image.size)
        size = columns * CROP_SIDE, rows * CROP_SIDE
        overview = _pixels(image.resize((CROP_SIDE, CROP_SIDE)))
        pixels = _pixels(image.resize(size)).reshape(3, rows, CROP_SIDE, columns, CROP_SIDE)
        crops = pixels.permute(1, 3, 0, 2, 4).flatten(0, 1)
        return torch.cat([overview[None], crops]), [size[1], size[0]]

    def __call__(self, images=(), **_):
        """Get pixels of images, and their sizes as (height, width). Texts are vLLM's to tokenize.

        Returns:
            A batch of `pixel_values`, [images, 1 + num_crops, 3, side, side], zero where an image
            has fewer crops, and `image_sizes`, [images, 2].
        """
        images = images if isinstance(images, list | tuple) else [images]
        cut = [self._crops(image) for image in images]
        pixels = torch.zeros(len(cut), 1 + self.num_crops, 3, CROP_SIDE, CROP_SIDE)
        for index, (crops, _size) in enumerate(cut):
            pixels[index, : len(crops)] = crops
        sizes = torch.tensor([size for _, size in cut])
        return BatchFeature({"pixel_values": pixels, "image_sizes": sizes})


def _pixels(image):
    """Get an image as numbers from -1 to 1, [3, height, width]."""
    pixels = torch.from_numpy(np.asarray(image.convert("RGB"), dtype=np.float32))
    return pixels.permute(2, 0, 1) / 127.5 - 1
