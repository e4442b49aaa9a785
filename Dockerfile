# An image for CPUs:  docker build -t headrace .
# for NVIDIA GPUs:    docker build -t headrace:cuda --build-arg EXTRAS=[cuda] .
#   docker run --rm -v "$PWD:/work" headrace train
#   docker run --rm --gpus all --shm-size 8g -v "$PWD:/work" headrace:cuda train --dataset-path photos/
# CUDA and cuDNN come as packages of pip: the host needs NVIDIA's driver and its container toolkit.
FROM python:3.13-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:3.13-slim-bookworm
ARG EXTRAS=""
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/headrace-*.whl)${EXTRAS}" && headrace --version > /tmp/version && grep 'kernels for CPUs: kernels' /tmp/version && rm /tmp/version
# read by NVIDIA's toolkit, without effect elsewhere
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN useradd --create-home --uid 1000 trainer && install --directory --owner 1000 /work
USER 1000
WORKDIR /work
ENTRYPOINT ["headrace"]
CMD ["--help"]
