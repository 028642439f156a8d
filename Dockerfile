# One image, four services: compose.yaml says which command a container runs.
#
# Built offline or behind a proxy: put wheels into deploy/wheels/ (see docs/deployment.md); they are
# preferred over the index. Without a torch wheel there, pip takes torch 2.13.0 from the index.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY protos protos
COPY native native
COPY planner planner
COPY gateway gateway
COPY gpu_worker gpu_worker
COPY cpu_worker cpu_worker
RUN python3 -m venv /build && /build/bin/pip wheel --no-deps --wheel-dir /wheels .
COPY deploy/wheels /wheels
RUN python3 -m venv /opt/moe-lens \
    && /opt/moe-lens/bin/pip install --no-cache-dir --find-links /wheels \
       --constraint constraints.txt 'moe-lens[engine,smg,otel]'

FROM ${BASE_IMAGE}
RUN groupadd --gid 10001 moelens && useradd --uid 10001 --gid moelens --create-home moelens
COPY --from=build /opt/moe-lens /opt/moe-lens
RUN install --directory --owner=moelens --group=moelens --mode=0700 /batches
COPY demo/model /models/demo
ENV PATH=/opt/moe-lens/bin:$PATH PYTHONUNBUFFERED=1
USER moelens
ENTRYPOINT ["moe-lens"]
CMD ["--help"]
