"""The batch calls of moelens.v1.Gateway."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

from moelens.v1 import gateway_pb2 as messages

from gateway.batch.jobs import BatchJobs, Job
from protos.calls import Context


class BatchCalls:
    """Mixed into the service; gateway.proto says what each call does."""

    jobs: BatchJobs

    async def SubmitBatch(
        self, requests: AsyncIterator[messages.SubmitBatchRequest], context: Context
    ) -> messages.SubmitBatchResponse:
        """See gateway.proto."""
        first = await anext(requests, messages.SubmitBatchRequest())

        async def pieces() -> AsyncIterator[bytes]:
            yield first.jsonl
            async for request in requests:
                yield request.jsonl

        job = await self.jobs.submit(first.batch_id, pieces())
        return messages.SubmitBatchResponse(progress=job.message())

    async def GetBatch(
        self, request: messages.GetBatchRequest, context: Context
    ) -> messages.GetBatchResponse:
        """See gateway.proto."""
        return messages.GetBatchResponse(progress=self.jobs.get(request.batch_id).message())

    async def CancelBatch(
        self, request: messages.CancelBatchRequest, context: Context
    ) -> messages.CancelBatchResponse:
        """See gateway.proto."""
        job = await self.jobs.cancel(request.batch_id)
        return messages.CancelBatchResponse(progress=job.message())

    async def WatchBatch(
        self, request: messages.WatchBatchRequest, context: Context
    ) -> AsyncIterator[messages.WatchBatchResponse]:
        """See gateway.proto."""
        job = self.jobs.get(request.batch_id)
        records = _Records(job, request.skip_records) if request.records else None
        async for _ in self.jobs.watch(job):
            progress = job.message()
            for record in records.new() if records else ():
                yield messages.WatchBatchResponse(record_json=record)
            yield messages.WatchBatchResponse(progress=progress)


class _Records:
    """Reads an output file on from where it stopped; an unfinished last line comes later."""

    def __init__(self, job: Job, skip: int) -> None:
        self._path: Path = job.output
        self._skip = skip
        self._offset_bytes = 0

    def new(self) -> list[str]:
        """Complete records that were not returned before."""
        if not self._path.exists():
            return []
        found = []
        with self._path.open("rb") as file:
            file.seek(self._offset_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset_bytes += len(line)
                if self._skip:
                    self._skip -= 1
                else:
                    found.append(json.dumps(json.loads(line)))
        return found
