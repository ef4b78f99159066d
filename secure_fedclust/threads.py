"""How many threads PyTorch may use."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_thread() -> Iterator[None]:
    """Run PyTorch on one thread.

    More of them add in an order that depends on the machine; and on small products they wait for
    each other longer than they work.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
