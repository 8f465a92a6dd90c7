# An image to compile and run programs with ddp in: LibTorch's wheel, the library, ddprun, ddp_bench.
#   docker build -t ddp .                                                            CPU
#   docker build -t ddp --build-arg BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04 --build-arg CUDA=ON .
#   docker run --rm --ipc=host ddp ddprun -n 2 ddp_bench --model mlp --modes none,ddp
ARG BASE=debian:12
FROM ${BASE}
ARG TORCH=2.11.0
ARG CUDA=OFF

RUN apt-get update \
  && apt-get install --yes --no-install-recommends ca-certificates python3 \
  && rm -rf /var/lib/apt/lists/*

# LibTorch apart from ddp's sources, which change more often.
COPY scripts/setup.sh scripts/check_wheels.py /opt/ddp/scripts/
RUN cpu=$([ "$CUDA" = ON ] || echo --cpu) \
  && XDG_CACHE_HOME=/opt/cache /opt/ddp/scripts/setup.sh $cpu --torch ${TORCH} \
  && ln -s "$(dirname "$(find /opt/cache -path '*/torch/version.py')")" /opt/ddp/torch \
  && rm -rf /var/lib/apt/lists/*
# Where CMake finds it, for ddp and for the programs that use it.
ENV CMAKE_PREFIX_PATH=/opt/ddp/torch

COPY . /opt/ddp/source
RUN cmake -S /opt/ddp/source -B /tmp/build -G Ninja -DCMAKE_BUILD_TYPE=Release -DDDP_USE_CCACHE=OFF \
    -DDDP_WITH_CUDA=${CUDA} -DDDP_BUILD_TESTS=OFF -DDDP_BUILD_EXAMPLES=OFF \
  && cmake --build /tmp/build \
  && cmake --install /tmp/build \
  && rm -rf /tmp/build
