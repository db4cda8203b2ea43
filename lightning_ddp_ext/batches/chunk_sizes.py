"""How a batch size becomes chunk sizes, one for each replica. Pure arithmetic."""

from collections.abc import Sequence
from fractions import Fraction


def proportional_chunks(batch_size: int, proportions: Sequence[float]) -> list[int]:
    """Share a batch in given proportions, rounding by largest remainder (Hamilton's method).

    Every chunk is within one sample of its exact share. Equal remainders go to the lower index.

    Args:
        batch_size: Number of samples to share.
        proportions: One non-negative number per replica, not all zero.

    Returns:
        One chunk size per replica; they add up to `batch_size`.

    Examples:
        >>> proportional_chunks(8, [2, 3, 3])
        [2, 3, 3]
        >>> proportional_chunks(3, [2, 3, 3])
        [1, 1, 1]
    """
    # Fractions, because a remainder that floats round the other way would move a sample between runs.
    exact = [Fraction(proportion) for proportion in proportions]
    total = sum(exact)
    shares = [batch_size * proportion / total for proportion in exact]
    chunks = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda index: (chunks[index] - shares[index], index))
    for index in by_remainder[: batch_size - sum(chunks)]:
        chunks[index] += 1
    return chunks


def even_chunks(batch_size: int, num_chunks: int) -> list[int]:
    """Share a batch evenly; remainders go to the lowest indices.

    Args:
        batch_size: Number of samples to share.
        num_chunks: Number of replicas.

    Returns:
        One chunk size per replica.

    Examples:
        >>> even_chunks(8, 3)
        [3, 3, 2]
    """
    share, remainder = divmod(batch_size, num_chunks)
    return [share + (index < remainder) for index in range(num_chunks)]


def first_limited_chunks(batch_size: int, num_chunks: int, first: int) -> list[int]:
    """Give the first replica at most `first` samples and share the rest evenly.

    The first replica never gets more than its even share, `ceil(batch_size / num_chunks)`. Wherever the
    BalancedDataParallel of Transformer-XL applies its own rule (`first` below the even share of the rest) the
    sizes are the same as there; elsewhere it splits as torch's DataParallel does, ignoring `first`.

    Args:
        batch_size: Number of samples to share.
        num_chunks: Number of replicas.
        first: Most samples the first replica may get; 0 leaves it without any.

    Returns:
        One chunk size per replica.

    Examples:
        >>> first_limited_chunks(8, 3, first=1)
        [1, 4, 3]
    """
    if num_chunks == 1:
        return [batch_size]
    first_chunk = min(first, -(-batch_size // num_chunks))
    return [first_chunk, *even_chunks(batch_size - first_chunk, num_chunks - 1)]


def merge_single_samples(chunks: Sequence[int]) -> list[int]:
    """Merge each chunk of one sample into a neighbour, for models that refuse a batch of one (batch normalisation).

    The neighbour is the next chunk that has samples, or the previous one behind the last. A batch of a single sample
    stays as it is.

    Args:
        chunks: One chunk size per replica.

    Returns:
        One chunk size per replica, none of them 1 unless the whole batch is.

    Examples:
        >>> merge_single_samples([1, 4, 3])
        [0, 5, 3]
        >>> merge_single_samples([4, 1])
        [5, 0]
    """
    merged = list(chunks)
    for index, size in enumerate(merged):
        if size != 1:
            continue
        following = [other for other in range(index + 1, len(merged)) if merged[other]]
        previous = [other for other in range(index - 1, -1, -1) if merged[other]]
        for neighbour in [*following, *previous][:1]:
            merged[neighbour] += 1
            merged[index] = 0
    return merged
