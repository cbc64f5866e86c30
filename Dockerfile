# Images from the locks in envs/: `data` for the controller and the stages before training, `train` for the stages
# that use weights, `track` and `search` for the rules that tell trackers and choose trials, `jupyter` for people.
#   docker build --target data  --build-arg REVISION=$(git rev-parse HEAD) -t vlmflow/data:0.1.0  .
#   docker build --target train --build-arg REVISION=$(git rev-parse HEAD) -t vlmflow/train:0.1.0 .
# The base is a slim Debian with Python 3.11 to 3.13; the wheels contain CUDA's libraries. For reproducible images, give
# the base by digest (--build-arg BASE=NAME@sha256:…); a digest written here would hold back Debian's security fixes.
# With BuildKit, `docker buildx build --sbom=true --provenance=true --push …` records the content of an image.
ARG BASE=docker.io/library/python:3.12-slim-bookworm

FROM ${BASE} AS base
RUN apt-get update \
 && apt-get install --yes --no-install-recommends git rsync tini \
 && rm -rf /var/lib/apt/lists/* \
 # Snakemake looks up the user's name, so the pods' numeric user needs an entry.
 && useradd --uid 1000 --create-home vlmflow
COPY envs/uv.lock envs/quick_plugins.py envs/quick_plugins.pth /opt/vlmflow/envs/
RUN python3 -m venv /opt/vlmflow/env \
 && /opt/vlmflow/env/bin/python -m pip install --no-cache-dir --require-hashes -r /opt/vlmflow/envs/uv.lock \
 && cp /opt/vlmflow/envs/quick_plugins.* \
      "$(/opt/vlmflow/env/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
# Snakemake makes every pod install the storage plugins with pip: from these wheels, never from an index.
COPY envs/data.lock /opt/vlmflow/envs/
RUN sed -n '/^snakemake-storage-plugin-/,/[^\\]$/p' /opt/vlmflow/envs/data.lock > /tmp/storage.lock \
 && /opt/vlmflow/env/bin/python -m pip download --no-cache-dir --no-deps --require-hashes \
      --dest /opt/vlmflow/wheels -r /tmp/storage.lock \
 && rm /tmp/storage.lock
ENV PATH=/opt/vlmflow/env/bin:$PATH PYTHONUNBUFFERED=1 \
    PIP_NO_INDEX=1 PIP_NO_DEPS=1 PIP_FIND_LINKS=/opt/vlmflow/wheels PIP_DISABLE_PIP_VERSION_CHECK=1
ENTRYPOINT ["/usr/bin/tini", "-g", "--"]

FROM base AS data
RUN uv pip install --no-cache --python /opt/vlmflow/env/bin/python --require-hashes --compile-bytecode \
      -r /opt/vlmflow/envs/data.lock
USER 1000
WORKDIR /home/vlmflow
ARG REVISION=unknown
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="vlmflow-data" \
      org.opencontainers.image.revision=$REVISION \
      org.opencontainers.image.version=$VERSION \
      org.opencontainers.image.licenses="Apache-2.0"

# What tells trackers about a run, and what chooses a search's trials: each in an environment of its own beside that of
# the data stages, whose rules start it.
FROM data AS track
USER 0
COPY envs/track.lock /opt/vlmflow/envs/
RUN uv venv --python /opt/vlmflow/env/bin/python /opt/vlmflow/env-track \
 && uv pip install --no-cache --python /opt/vlmflow/env-track/bin/python --require-hashes --compile-bytecode \
      -r /opt/vlmflow/envs/track.lock
ENV VLMFLOW_VENV_TRACK=/opt/vlmflow/env-track
USER 1000
ARG REVISION=unknown
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="vlmflow-track" \
      org.opencontainers.image.revision=$REVISION \
      org.opencontainers.image.version=$VERSION \
      org.opencontainers.image.licenses="Apache-2.0"

FROM data AS search
USER 0
COPY envs/search.lock /opt/vlmflow/envs/
RUN uv venv --python /opt/vlmflow/env/bin/python /opt/vlmflow/env-search \
 && uv pip install --no-cache --python /opt/vlmflow/env-search/bin/python --require-hashes --compile-bytecode \
      -r /opt/vlmflow/envs/search.lock
ENV VLMFLOW_VENV_SEARCH=/opt/vlmflow/env-search
USER 1000
ARG REVISION=unknown
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="vlmflow-search" \
      org.opencontainers.image.revision=$REVISION \
      org.opencontainers.image.version=$VERSION \
      org.opencontainers.image.licenses="Apache-2.0"

FROM base AS train
# Triton's and DeepSpeed's kernels are compiled when a training starts: Liger, and strategies that offload the optimizer.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
COPY envs/train.lock /opt/vlmflow/envs/
RUN uv pip install --no-cache --python /opt/vlmflow/env/bin/python --require-hashes --compile-bytecode \
      -r /opt/vlmflow/envs/train.lock
# k8s/components/serve starts vlmflow/serving/guarded.py without a checkout.
COPY scripts/vlmflow /opt/vlmflow/vlmflow
USER 1000
WORKDIR /home/vlmflow
ARG REVISION=unknown
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="vlmflow-train" \
      org.opencontainers.image.revision=$REVISION \
      org.opencontainers.image.version=$VERSION \
      org.opencontainers.image.licenses="Apache-2.0"

# For people who look at results (k8s/components/jupyter). Unlike the others it has the library: no run brings it one.
#   docker build --target jupyter --build-arg REVISION=$(git rev-parse HEAD) -t vlmflow/jupyter:0.1.0 .
FROM data AS jupyter
USER 0
COPY envs/jupyter.lock /opt/vlmflow/envs/
RUN uv pip install --no-cache --python /opt/vlmflow/env/bin/python --require-hashes --compile-bytecode \
      -r /opt/vlmflow/envs/jupyter.lock
COPY scripts/vlmflow /opt/vlmflow/scripts/vlmflow
COPY notebooks/look.ipynb /opt/vlmflow/notebooks/
ENV PYTHONPATH=/opt/vlmflow/scripts
USER 1000
ARG REVISION=unknown
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="vlmflow-jupyter" \
      org.opencontainers.image.revision=$REVISION \
      org.opencontainers.image.version=$VERSION \
      org.opencontainers.image.licenses="Apache-2.0"
