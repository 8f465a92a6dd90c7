# ddp::mpi, the backend over MPI: a library of its own, so that libddp and ddprun never need libmpi.
#
# DDP_WITH_MPI: AUTO builds it where CMake finds an MPI, ON fails without one.
include(${CMAKE_CURRENT_LIST_DIR}/DdpFindMpi.cmake)

set(DDP_HAS_MPI OFF)
set(ddp_no_mpi "DDP_WITH_MPI is OFF")
if(NOT DDP_WITH_MPI STREQUAL "OFF")
  if(BUILD_SHARED_LIBS)
    set(ddp_no_mpi "libddp.so hides what ddp::mpi is made of: build static libraries")
  else()
    ddp_find_mpi(ddp_no_mpi)
  endif()
  if(NOT ddp_no_mpi)
    set(DDP_HAS_MPI ON)
  elseif(DDP_WITH_MPI STREQUAL "ON")
    message(FATAL_ERROR "DDP_WITH_MPI is ON, but ${ddp_no_mpi}.")
  endif()
endif()
if(NOT DDP_HAS_MPI)
  message(STATUS "ddp::mpi is left out: ${ddp_no_mpi}")
  return()
endif()
message(STATUS "ddp::mpi: ${DDP_MPI_VERSION}")

set(mpi_dir ${PROJECT_SOURCE_DIR}/comm/backends/mpi)
add_library(ddp_mpi STATIC
  ${mpi_dir}/channel.cpp
  ${mpi_dir}/mpi_backend.cpp
  ${mpi_dir}/mpi_calls.cpp
  ${mpi_dir}/mpi_thread.cpp
  ${mpi_dir}/register.cpp
  ${mpi_dir}/start_mpi.cpp
  ${mpi_dir}/operations/exchange.cpp
  ${mpi_dir}/operations/messages.cpp
  ${mpi_dir}/operations/reduction.cpp
  ${mpi_dir}/operations/sparse_reduction.cpp)
add_library(ddp::mpi ALIAS ddp_mpi)
set_target_properties(ddp_mpi PROPERTIES EXPORT_NAME mpi)
target_include_directories(ddp_mpi PRIVATE ${PROJECT_SOURCE_DIR}/comm)
target_link_libraries(ddp_mpi
  PUBLIC ddp_core
  PRIVATE ddp_mpi_library $<BUILD_INTERFACE:ddp_comm_internal> $<BUILD_INTERFACE:ddp_warnings>)
target_compile_options(ddp_mpi PRIVATE -ffp-contract=off)
# Nothing of a program names the file that registers the backend.
target_link_options(ddp_mpi INTERFACE LINKER:-u,ddp_mpi_registered)
ddp_use_pch(ddp_mpi C10D)
if(DDP_INSTALL)
  install(TARGETS ddp_mpi EXPORT ddpMpiTargets)
endif()
