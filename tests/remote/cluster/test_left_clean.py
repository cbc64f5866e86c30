"""The machine is the same after the cluster as before. Run last (conftest.py), because it stops the cluster."""

from pathlib import Path

from cluster import addons, images, jobs
from cluster.cluster import Cluster
from cluster.machine import machine_state
from cluster.paths import LINK


def test_a_cluster_that_ran_leaves_nothing_behind(cluster: Cluster) -> None:
    cluster.down()
    before = machine_state()
    assert LINK not in before["links"]
    assert not before["cgroups"]
    cluster.up()
    cluster.add_node()
    addons.start_dns(cluster)
    cluster.carry_in(images.project_image("data"))
    forever = jobs.job("forever", ["sleep", "1000"], images.image_name("data"), nodeName="node-b")
    cluster.apply(forever)
    jobs.run(cluster, jobs.job("one", ["true"], images.image_name("data"), nodeName="node-a"))
    assert machine_state() != before
    cluster.down()
    after = machine_state()
    assert {key: value for key, value in after.items() if before[key] != value} == {}


def test_a_node_that_was_killed_leaves_nothing_behind(cluster: Cluster) -> None:
    cluster.down()
    before = machine_state()
    cluster.up()
    # An open namespace outlives its last process, as on a busy machine.
    with Path(f"/proc/{cluster.node.pid}/ns/net").open():
        cluster.add_node().kill()
        cluster.node.kill()
        assert not cluster.running()
        assert LINK in machine_state()["links"]
        cluster.down()
        assert machine_state() == before
