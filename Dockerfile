# An image to compile and run programs with ddp in: LibTorch's wheel, the library, ddprun, ddp_bench.
#   docker build -t ddp .                                                            CPU
#   docker build -t ddp --build-arg BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04 .      CUDA and NCCL
#   docker run --rm --ipc=host ddp ddprun -n 2 ddp_bench --model mlp --modes none,ddp
ARG BASE=debian:12
FROM ${BASE}
ARG TORCH=2.11.0

# Where setup.sh puts LibTorch, and CMake looks for it.
ENV XDG_CACHE_HOME=/opt/cache

RUN apt-get update \
  && apt-get install --yes --no-install-recommends ca-certificates git python3 \
  && rm -rf /var/lib/apt/lists/*

COPY scripts/setup.sh scripts/check_wheels.py /opt/ddp/scripts/
RUN /opt/ddp/scripts/setup.sh --torch ${TORCH} && rm -rf /var/lib/apt/lists/*

COPY . /opt/ddp/source
RUN cmake -S /opt/ddp/source -B /tmp/build -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DDDP_TORCH_WHEEL=${TORCH} -DDDP_BUILD_TESTS=OFF -DDDP_BUILD_EXAMPLES=OFF \
  && cmake --build /tmp/build --target ddp ddprun ddp_bench \
  && cmake --install /tmp/build \
  && rm -rf /tmp/build /opt/ddp/source /opt/cache/ccache
