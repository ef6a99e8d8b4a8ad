"""Jobs by node, as the topology itself would say."""

from __future__ import annotations

from detectors.rules.places import Places
from trainwarden.records import TopologyEvent
from trainwarden.topology import Topology


def test_places_agree_with_the_topology() -> None:
    topology = Topology()
    for job, members in (("b", ("n1", "n2", "n1")), ("a", ("n3", "n2"))):
        ranks = tuple((rank, node, "gpu0") for rank, node in reversed(list(enumerate(members))))
        topology.apply(TopologyEvent(entity=f"job:{job}", origin="scheduler", valid_from_ns=1, ranks=ranks))
    places = Places(topology)
    for node in ("n1", "n2", "n3", "n4"):
        layout, lowest = places.of(node, "")
        assert layout == topology.job_of(node), node
        assert lowest == (min(layout.ranks_on(node)) if layout is not None else -1), node
    layout, lowest = places.of("n2", "b")
    assert layout is not None
    assert (layout.job, lowest) == ("b", 1)
    assert places.of("n3", "b")[1] == -1
    assert places.of("n3", "gone") == (None, -1)
