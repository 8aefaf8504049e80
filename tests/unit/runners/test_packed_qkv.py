"""How the blocks of a launch are shared out among the parts of a matrix in two formats."""

import pytest

from nightmill.worker.runners.gpu.products.packed.packed_qkv import shares


def test_each_tile_has_a_block_where_all_run_at_once() -> None:
    assert shares((64, 8), at_once=132, cluster=1) == (64, 8)
    assert shares((132,), at_once=132, cluster=1) == (132,)


def test_one_part_has_all_blocks() -> None:
    assert shares((300,), at_once=132, cluster=2) == (132,)


@pytest.mark.parametrize("needed", [(256, 32), (128, 16), (2000, 2), (2, 2000), (130, 130)], ids=str)
@pytest.mark.parametrize("cluster", [1, 2])
def test_parts_end_together_in_whole_clusters(needed: tuple[int, int], cluster: int) -> None:
    at_once = 132
    blocks = shares(needed, at_once, cluster)
    assert sum(blocks) == at_once
    assert all(count > 0 and count % cluster == 0 for count in blocks)
    rounds = max(-(-tiles // count) for tiles, count in zip(needed, blocks, strict=True))
    fewest = min(
        max(-(-needed[0] // (at_once - last)), -(-needed[1] // last))
        for last in range(cluster, at_once, cluster)
    )
    assert rounds == fewest <= 2 + sum(needed) // at_once
