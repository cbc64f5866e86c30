# Two images from the locks in envs/: `data` for the stages before training, `train` for those that touch weights.
#   docker build --target data  -t vlmflow-data  .
#   docker build --target train -t vlmflow-train .
# The base is a slim Debian with Python 3.11 to 3.13; CUDA's libraries come with the wheels.
ARG BASE=docker.io/library/python:3.12-slim-bookworm

FROM ${BASE} AS base
RUN apt-get update \
 && apt-get install --yes --no-install-recommends git rsync tini \
 && rm -rf /var/lib/apt/lists/* \
 # Snakemake asks for the user's name: the numeric user that pods run as needs an entry.
 && useradd --uid 1000 --create-home vlmflow
COPY envs/uv.lock /opt/vlmflow/envs/
RUN python3 -m venv /opt/vlmflow/env \
 && /opt/vlmflow/env/bin/python -m pip install --no-cache-dir --require-hashes -r /opt/vlmflow/envs/uv.lock
ENV PATH=/opt/vlmflow/env/bin:$PATH PYTHONUNBUFFERED=1
ENTRYPOINT ["/usr/bin/tini", "-g", "--"]

FROM base AS data
COPY envs/data.lock /opt/vlmflow/envs/
RUN uv pip install --no-cache --python /opt/vlmflow/env/bin/python --require-hashes --compile-bytecode \
      -r /opt/vlmflow/envs/data.lock
USER 1000
WORKDIR /home/vlmflow

FROM base AS train
COPY envs/train.lock /opt/vlmflow/envs/
RUN uv pip install --no-cache --python /opt/vlmflow/env/bin/python --require-hashes --compile-bytecode \
      -r /opt/vlmflow/envs/train.lock
USER 1000
WORKDIR /home/vlmflow
