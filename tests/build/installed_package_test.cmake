# Installs the build in BUILD_DIR below WORK_DIR, then configures, builds and runs tests/consumer
# with only that prefix and the LibTorch in TORCH_DIR, and builds the installed examples. WORK_DIR
# has a space in its name on purpose.

include("${CMAKE_CURRENT_LIST_DIR}/run.cmake")

file(REMOVE_RECURSE "${WORK_DIR}")
set(prefix "${WORK_DIR}/prefix")
run(${CMAKE_COMMAND} --install "${BUILD_DIR}" --config "${CONFIG}" --prefix "${prefix}")

# The package must not contain paths of the machine that built it, such as its folders or its
# LibTorch. Debug information names folders, so only optimized binaries are searched, and ddp_bench
# has to find LibTorch.
get_filename_component(torch_prefix "${TORCH_DIR}/../../.." ABSOLUTE)
function(expect_nowhere kind where)
  foreach(folder IN LISTS ARGN)
    string(REGEX REPLACE "([][+.*()^$?|{}\\])" "\\\\\\1" escaped "${folder}")
    # Matches only where a path begins: a clone in /ddp must not match include/ddp.
    try(grep -r --files-with-matches ${kind} -E "(^|[^[:alnum:]_.}/-])${escaped}(/|[^[:alnum:]_.-]|$)" ${where})
    if(NOT status EQUAL 1)
      message(FATAL_ERROR "expected no installed file to name ${folder}, got:\n${output}")
    endif()
  endforeach()
endfunction()
set(ENV{LC_ALL} C)
expect_nowhere(--binary-files=without-match "${prefix}" "${BUILD_DIR}" "${SOURCE_DIR}" "${torch_prefix}")
if(CONFIG STREQUAL "Release")
  expect_nowhere(--binary-files=text "${prefix}" "${BUILD_DIR}" "${SOURCE_DIR}")
  file(GLOB libraries "${prefix}/lib*/libddp*")
  expect_nowhere(--binary-files=text "${libraries}" "${torch_prefix}")
endif()
file(GLOB binaries "${prefix}/bin/*" "${prefix}/lib*/*.so")
foreach(binary IN LISTS binaries)
  run(readelf -d "${binary}")
  if(output MATCHES "NEEDED[^\n]*libmpi")
    message(FATAL_ERROR "${binary}: expected no need of MPI, got:\n${output}")
  endif()
  if(output MATCHES "R(UN)?PATH" AND NOT binary MATCHES "/(ddp_bench|ddp_consolidate)$") # which are run, not linked
    message(FATAL_ERROR "${binary}: expected no RPATH, got:\n${output}")
  endif()
endforeach()

set(consumer -S "${SOURCE_DIR}/tests/consumer")
# Without a LibTorch the package names the one that it needs.
expect_no_configuration("no torch" "LibTorch was not found\\. This ddp was built with LibTorch 2\\.[0-9.]+.* \"-DCMAKE_PREFIX_PATH=/[^;]+/prefix;/path"
  ${consumer} "-DCMAKE_PREFIX_PATH=${prefix}")

expect_no_configuration("no component" "expected the components core, .* or mpi, got checkpoints"
  ${consumer} "-Dddp_ROOT=${prefix}" "-DTorch_DIR=${TORCH_DIR}" -DALONE=checkpoints)

# The package rejects a LibTorch that is too old.
set(old "${WORK_DIR}/old/share/cmake/Torch")
file(WRITE "${old}/TorchConfig.cmake" "")
file(WRITE "${old}/TorchConfigVersion.cmake" "set(PACKAGE_VERSION 2.10.0)")
expect_no_configuration("old torch" "LibTorch: expected version 2\\.11 or newer, got 2\\.10\\.0 in "
  ${consumer} "-Dddp_ROOT=${prefix}" "-DTorch_DIR=${old}")

# An MPI is asked for by those alone who use it, and must be the one that the package was built with.
set(over_mpi "")
if(WITH_MPI)
  set(over_mpi -DOVER_MPI=ON)
  set(found "-Dddp_ROOT=${prefix}" "-DTorch_DIR=${TORCH_DIR}" ${over_mpi})
  expect_no_configuration("no mpi" "ddp::mpi needs MPI, but no MPI was found"
    ${consumer} ${found} -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON)
  foreach(mpi openmpi mpich)
    find_program(mpi_compiler_of_${mpi} mpicxx.${mpi})
    if(mpi_compiler_of_${mpi} AND NOT mpi STREQUAL MPI_NAME)
      expect_no_configuration("other mpi" "ddp::mpi was built with .*, and CMake found .*: name the other one by"
        ${consumer} ${found} "-DMPI_CXX_COMPILER=${mpi_compiler_of_${mpi}}")
    endif()
  endforeach()
  expect_no_configuration("from sources" "DDP_WITH_MPI is ON, but no MPI was found"
    -S "${SOURCE_DIR}" "-DTorch_DIR=${TORCH_DIR}" -DDDP_WITH_MPI=ON -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON)
endif()

set(ENV{CMAKE_PREFIX_PATH} "${prefix}:${torch_prefix}")
# As the newest C++; as the oldest in shared_package and from_sources. ddp::core alone is from_sources' matter. By the compiler of the build the
# examples are built below.
use_as_consumer(consumer "${other_compiler}" ${newest_standard} ${over_mpi} -DALONE=training,parallel,checkpoint)
if(configured MATCHES "ddp was built with LibTorch")
  message(FATAL_ERROR "expected the LibTorch that ddp was built with:\n${configured}")
endif()
unset(ENV{CMAKE_PREFIX_PATH})

run("${prefix}/bin/ddprun" --version)
if(NOT output MATCHES "^ddprun [0-9]+\\.[0-9]+\\.[0-9]+\n$")
  message(FATAL_ERROR "expected ddprun to say its version, got:\n${output}")
endif()
run("${prefix}/bin/ddp_plan" --version)
if(NOT output MATCHES "^ddp_plan [0-9]+\\.[0-9]+\\.[0-9]+\n$")
  message(FATAL_ERROR "expected ddp_plan to say its version, got:\n${output}")
endif()
run(${as_newcomer} --unset=LD_LIBRARY_PATH "${prefix}/bin/ddp_consolidate" --version)
if(NOT output MATCHES "^ddp_consolidate [0-9]+\\.[0-9]+\\.[0-9]+\n$")
  message(FATAL_ERROR "expected ddp_consolidate to say its version, got:\n${output}")
endif()
if(EXISTS "${BUILD_DIR}/bin/ddp_bench")
  run(${as_newcomer} --unset=LD_LIBRARY_PATH "${prefix}/bin/ddp_bench" --help)
endif()

run(${as_newcomer} ${CMAKE_COMMAND} -S "${prefix}/share/ddp/examples" -B "${WORK_DIR}/examples"
  ${settings} -DCMAKE_CXX_STANDARD=${newest_standard} "-Dddp_ROOT=${prefix}" "-DTorch_DIR=${TORCH_DIR}")
run(${CMAKE_COMMAND} --build "${WORK_DIR}/examples" --config "${CONFIG}" --target minimal)
run("${prefix}/bin/ddprun" -n 2 "${WORK_DIR}/examples/bin/minimal")
if(NOT output MATCHES "y = ")
  message(FATAL_ERROR "minimal: expected a line, got:\n${output}")
endif()
if(NOT EXISTS "${prefix}/share/ddp/README.md" OR NOT EXISTS "${prefix}/share/ddp/examples/README.md")
  message(FATAL_ERROR "expected README.md in share/ddp and in share/ddp/examples")
endif()
