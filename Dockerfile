# A run on NVIDIA GPUs in a container, as the user 1000:
#   docker build --tag megajax .
#   docker run --gpus all --ipc=host --volume "$PWD/runs:/work/runs" megajax train --config=quickstart.py
# --ipc=host: NCCL exchanges data between GPUs in /dev/shm, and the default of 64 MB is too small.
# CUDA's libraries come with the wheels of jax; only the driver is the host's.
ARG BASE=nvidia/cuda:12.9.1-base-ubuntu24.04

FROM python:3.12-slim AS wheel
RUN pip install --no-cache-dir uv==0.13.9
WORKDIR /source
COPY . .
RUN uv build --wheel --out-dir /wheel \
    && uv export --quiet --frozen --no-emit-project --no-hashes --extra all --extra cuda12 --output-file /wheel/versions.txt

FROM ${BASE}
ARG EXTRAS=cuda12,tokenizers,data,monitor,serve
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && userdel --remove ubuntu \
    && useradd --uid 1000 --create-home --home-dir /work megajax
COPY --from=wheel /usr/local/bin/uv /usr/local/bin/uv
COPY --from=wheel /wheel /wheel
RUN uv venv --python /usr/bin/python3 /opt/megajax \
    && uv pip install --no-cache --compile-bytecode --python /opt/megajax/bin/python \
    --constraint /wheel/versions.txt "megajax[$EXTRAS] @ file://$(ls /wheel/*.whl)"
ENV PATH=/opt/megajax/bin:$PATH
USER 1000
WORKDIR /work
ENTRYPOINT ["megajax"]
CMD ["--help"]
