"""The management service of a script's cluster: the one that is named, or that of the cluster of this machine."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from cstorch.distributed.cluster_config import ClusterConfig, is_address
from cstorch.errors import ConfigurationError
from waferbox import settings
from waferbox.launch.local_clusters import EMBEDDED, LocalCluster, for_everybody, listed, local_clusters, with_name
from waferbox.security.tokens import Kind, own_clusters_token, user_token

logger = logging.getLogger("cstorch.cluster")

_OWN = f"{settings.MANAGEMENT.name}={EMBEDDED} starts one for this script alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Management:
    """The management service of a cluster that runs.

    Args:
        address: `host:port`.
        source: The place that the address comes from, for messages.
        is_own: Whether it was found as a cluster of this account on this machine, and not by its address.
        secret_file: The file with the secret of a cluster of this account; empty: that of this script's clusters.
    """

    address: str
    source: str
    is_own: bool
    secret_file: str = ""

    def token(self) -> str:
        """Returns the script's token for the cluster; for an own one whatever token the environment has."""
        if self.is_own:
            return own_clusters_token(Kind.USER, self.secret_file)
        return user_token(self.address, self.secret_file)


def find_management(config: ClusterConfig) -> Management | None:
    """Returns the management service that a script uses; None if it starts a cluster of its own.

    A script that names no cluster uses that of `waferbox up` on this machine, as commands do, if it is large enough.

    Args:
        config: The settings of the cluster.

    Raises:
        ConfigurationError: There is no cluster of the name, or the script may mean several.
    """
    named, source = config.named_management()
    if named == EMBEDDED:
        return None
    if named and is_address(named):
        secret_file = next((cluster.secret for cluster in _running() if cluster.management == named), "")
        return Management(address=named, source=source, is_own=False, secret_file=secret_file)
    known = _running()
    chosen = with_name(known, named) if named else _large_enough(known, config)
    if named and not chosen:
        raise ConfigurationError(
            f"{source} is {named!r}, which is neither host:port nor a cluster of this machine ({listed(known)})"
        )
    if not chosen:
        return None
    if len(chosen) > 1:
        raise ConfigurationError(
            f"several clusters of `waferbox up` run on this machine ({listed(known)}): name one, as in "
            f"{settings.MANAGEMENT.name}={chosen[0].name}; {_OWN}"
        )
    (cluster,) = chosen
    cluster.use_certificates()
    if not named:
        logger.info("Using the cluster %r of `waferbox up` at %s (%s)", cluster.name, cluster.management, _OWN)
        source = f"the record of the cluster {cluster.name!r} of `waferbox up`; {_OWN}"
    return Management(address=cluster.management, source=source, is_own=True, secret_file=cluster.secret)


def _large_enough(known: Sequence[LocalCluster], config: ClusterConfig) -> list[LocalCluster]:
    """Returns the clusters of `waferbox up` that can run the script's job, and logs why others cannot."""
    found = []
    workers = config.num_csx * config.num_workers_per_csx
    for cluster in for_everybody(known):
        if cluster.wafers >= config.num_csx and cluster.workers >= workers:
            found.append(cluster)
        else:
            logger.info(
                "The cluster %r of `waferbox up` has too little for this script (wafers: %d, of %d; input workers: %d, "
                "of %d)",
                *(cluster.name, cluster.wafers, config.num_csx, cluster.workers, workers),
            )
    return found


def _running() -> list[LocalCluster]:
    try:
        return local_clusters()
    except OSError as error:
        logger.debug("the records of this machine's clusters cannot be read: %s", error)
        return []
