# Paceline in an image, for CPUs by default:
#     docker build --tag paceline .
# For GPUs, on a base that has torch for them:
#     docker build --tag paceline --build-arg BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime .
# The base needs Python 3.11 or later with venv.
#
# Without Docker and without a registry, buildah builds it on a base of Debian packages. pip takes its packages from a
# folder that was filled before with a Python of the base's version (3.11):
#     mmdebstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm rootfs.tar
#     container=$(buildah from scratch) && buildah add $container rootfs.tar / && buildah commit $container debian-python
#     pip download --constraint constraints.txt --dest wheels '.[examples,report]' hatchling
#     buildah build --isolation chroot --tag paceline --build-arg BASE=localhost/debian-python \
#         --build-arg PIP_NO_INDEX=1 --build-arg PIP_FIND_LINKS=/wheels --volume $PWD/wheels:/wheels:ro .
# podman then runs the image, and `podman-compose --file docker/compose.yaml up` starts the services.
ARG BASE=python:3.11-slim
FROM ${BASE}

# Where pip also looks for torch: its CPU build, which the package index does not have for every Python. A base that has
# torch keeps it, because the environment below sees the base's packages.
ARG PIP_FIND_LINKS=https://download.pytorch.org/whl/cpu/torch/
# 1 where the package index can't be reached: pip then asks only those places.
ARG PIP_NO_INDEX
ARG EXTRAS=examples,report

RUN python3 -m venv --system-site-packages /opt/paceline
ENV PATH=/opt/paceline/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
COPY docs docs
# A torch of the base stays, so it isn't pinned.
RUN if python3 -c "import torch"; then sed -i '/^torch==/d' constraints.txt; fi; \
    pip install --no-cache-dir --constraint constraints.txt ".[$EXTRAS]" && rm -rf /src/*

# /data is for data sets, /runs for run folders; all hosts of a run mount the same /runs.
VOLUME ["/data", "/runs"]
WORKDIR /job
ENTRYPOINT []
CMD ["paceline", "--help"]
