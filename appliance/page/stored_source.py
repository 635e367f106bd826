"""The data of the page with the stored jobs of earlier clusters, besides those of the cluster."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from appliance.finished_jobs import FinishedJobs
from appliance.page.source import PageSource
from wsc.v1 import management_pb2, observation_pb2


class StoredSource:
    """The PageSource of a cluster with the jobs of a file that it no longer has. Used in the page's event loop."""

    def __init__(self, cluster: PageSource, finished: FinishedJobs) -> None:
        self._cluster = cluster
        self._finished = finished

    async def nodes(self) -> Sequence[management_pb2.NodeInfo]:
        return await self._cluster.nodes()

    async def targets(self) -> Sequence[tuple[str, str]]:
        return await self._cluster.targets()

    async def jobs(self) -> Sequence[management_pb2.JobInfo]:
        jobs = await self._cluster.jobs()
        names = {job.job for job in jobs}
        stored = await asyncio.to_thread(self._finished.jobs)
        return [*jobs, *(job for job in stored if job.job not in names)]

    async def job(self, name: str) -> management_pb2.JobInfo | None:
        job = await self._cluster.job(name)
        if job is not None:
            return job
        stored = await asyncio.to_thread(self._finished.jobs)
        return next((job for job in stored if job.job == name), None)

    async def events(self, name: str) -> AsyncIterator[observation_pb2.JobEvents]:
        if await self._cluster.job(name) is None:
            yield await asyncio.to_thread(self._finished.events, name)
            return
        async for events in self._cluster.events(name):
            yield events
