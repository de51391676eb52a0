"""Groups of a micro-benchmark in link domains."""

import pytest

from search_spaces.clusters.microbenchmark import GroupShape, network_sharing, ranks_in_domain
from search_spaces.clusters.presets import resolve_cluster

INSIDE, ONE_A_NODE, ALL = (
    GroupShape(ranks=4, in_node=4),
    GroupShape(ranks=36, in_node=1, sharing=4),
    GroupShape(ranks=144, in_node=4),
)


@pytest.mark.parametrize(
    ("group", "in_domain", "sharing"),
    [(INSIDE, 4, 1.0), (ONE_A_NODE, 18, 4 / 18), (ALL, 72, 4 / 72), (GroupShape(ranks=18, in_node=1, sharing=4), 18, 4 / 18)],
)
def test_the_ranks_of_linked_nodes_are_together(group: GroupShape, in_domain: int, sharing: float) -> None:
    cluster = resolve_cluster("gb200-nvl72:36")
    assert ranks_in_domain(group, cluster) == in_domain
    assert network_sharing(group, cluster) == pytest.approx(sharing)


@pytest.mark.parametrize("group", [INSIDE, ONE_A_NODE, ALL])
def test_without_link_domains_the_ranks_of_a_node_are_together(group: GroupShape) -> None:
    cluster = resolve_cluster("dgx-h100:36")
    assert (ranks_in_domain(group, cluster), network_sharing(group, cluster)) == (group.in_node, group.sharing)
