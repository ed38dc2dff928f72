"""The same calibration as a Ray job: submitted, followed line by line, and ended with its own exit status."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Sequence

from ray.job_submission import JobStatus, JobSubmissionClient


async def _follow(client: JobSubmissionClient, job: str, show: Callable[[str], None]) -> None:
    async for text in client.tail_job_logs(job):
        show(text)


def run_as_job(address: str, arguments: Sequence[str], show: Callable[[str], None], gpus: float = 0) -> bool:
    """Runs ``scd calibrate ARGUMENTS`` on the cluster whose dashboard is at ``address``.

    Paths among the arguments are the cluster's: keep corpus, models and registry on storage that its nodes share.

    Args:
        address: the dashboard's, such as ``http://127.0.0.1:8265``.
        show: takes the job's output as it comes.
        gpus: GPUs reserved for the job's own process.

    Returns:
        Whether the job succeeded.
    """
    client = JobSubmissionClient(address)
    job = client.submit_job(
        entrypoint=shlex.join(["scd", "calibrate", *arguments]), entrypoint_num_gpus=gpus or None
    )
    show(f"job {job} submitted to {address}\n")
    asyncio.run(_follow(client, job, show))
    status = client.get_job_status(job)
    if status != JobStatus.SUCCEEDED:
        show(f"job {job}: {status}: {client.get_job_info(job).message}\n")
    return bool(status == JobStatus.SUCCEEDED)
