# shellcheck shell=bash
# The environment of processes over NCCL that share the first GPU. NCCL refuses that for ranks of one
# host, so each has an NCCL_HOSTID of its own, and they talk over sockets.
export NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
export NCCL_NVLS_ENABLE=0 NCCL_MNNVL_ENABLE=0 CUDA_VISIBLE_DEVICES=0
