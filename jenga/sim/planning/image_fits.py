"""Number of requests with images that fit, with embeddings in the arena and in vLLM's cache."""

from dataclasses import dataclass

from jenga.geometry import check_arena
from jenga.sim.arenas.baseline_geometries import geometry_by_name
from jenga.sim.planning.plan import (
    CHUNK_TOKENS,
    Plan,
    decode_bytes,
    fit_of,
    longest_request,
    without_embeddings,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFit:
    """Requests of one length, each with a typical image, that fit at once.

    Attributes:
        num_tokens: Tokens of each request, those of its image included.
        num_requests: Number of requests that fit after their images were read.
        num_unread: Number of requests that fit before any image was read. Each of them has all its
            keys and values and all its embeddings.
    """

    num_tokens: int
    num_requests: int
    num_unread: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFits:
    """Two places for image embeddings.

    Attributes:
        image_tokens: Tokens of a typical image.
        image_bytes: Bytes of its embeddings.
        cache_bytes: Bytes of embeddings for which vLLM's encoder cache has room. They are memory
            that the arena does not get.
        in_arena: One result for each length, with embeddings in pages of the arena.
        in_cache: The same with embeddings in vLLM's encoder cache, beside a smaller arena.
    """

    image_tokens: int
    image_bytes: int
    cache_bytes: int
    in_arena: tuple[ImageFit, ...]
    in_cache: tuple[ImageFit, ...]


def image_fits(plan: Plan) -> ImageFits | None:
    """Count the requests with images that fit.

    vLLM's encoder cache has room for as many embeddings as a step has tokens, or for one image if
    that has more.

    Args:
        plan: Plan of the model. Lengths for which an image is too long are left out.

    Returns:
        None if embeddings have no pages of the arena: the model takes no images, a pipeline or a
        shared arena is planned, or the plan does not start. Also None if no length is left.
    """
    geometry, system = plan.geometry, plan.systems[0]
    types = [each for each in plan.model.layer_types if each.is_consumed and each.has_pages]
    if not types or geometry is None:
        return None
    image_tokens = max(each.typical_tokens for each in types)
    row_bytes = sum(each.slot_bytes for each in types)
    cache_tokens = max(CHUNK_TOKENS, image_tokens)
    fits = [fit for fit in system.fits if fit.num_tokens > image_tokens]
    if not fits:
        return None
    in_arena: list[ImageFit] = []
    for fit in fits:
        needed = decode_bytes(plan.model, fit.num_tokens)
        unread = fit_of(
            geometry, system.num_units, fit.num_tokens, needed=needed, holds_images=True
        )
        in_arena.append(
            ImageFit(
                num_tokens=fit.num_tokens,
                num_requests=fit.num_requests,
                num_unread=min(fit.num_requests, unread.num_requests),
            )
        )
    return ImageFits(
        image_tokens=image_tokens,
        image_bytes=image_tokens * row_bytes,
        cache_bytes=cache_tokens * row_bytes,
        in_arena=tuple(in_arena),
        in_cache=_in_cache(
            plan,
            tuple(fit.num_tokens for fit in fits),
            arena_bytes=plan.arena_bytes - cache_tokens * row_bytes,
            num_images=cache_tokens // image_tokens,
        ),
    )


def _in_cache(
    plan: Plan, lengths: tuple[int, ...], *, arena_bytes: int, num_images: int
) -> tuple[ImageFit, ...]:
    """Count requests beside an encoder cache.

    Args:
        plan: Plan of the model.
        lengths: Tokens of the requests.
        arena_bytes: Bytes of the arena beside the cache. Less than 1 if there are none.
        num_images: Number of images for which the cache has room.
    """
    model = without_embeddings(plan.model)
    try:
        geometry = geometry_by_name("planned", model, arena_bytes=arena_bytes)
        num_large_pages = check_arena(geometry, arena_bytes)
    except ValueError:  # the rest holds no large page
        return tuple(ImageFit(num_tokens=each, num_requests=0, num_unread=0) for each in lengths)
    longest_tokens = longest_request(geometry, model, num_large_pages)
    fits: list[ImageFit] = []
    for num_tokens in lengths:
        needed = decode_bytes(model, num_tokens)
        num_requests = fit_of(geometry, num_large_pages, num_tokens, needed=needed).num_requests
        if longest_tokens is not None and num_tokens > longest_tokens:
            num_requests = 0
        fits.append(
            ImageFit(
                num_tokens=num_tokens,
                num_requests=num_requests,
                num_unread=min(num_requests, num_images),
            )
        )
    return tuple(fits)
