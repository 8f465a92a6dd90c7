# Builds libddp.so in SHARED_BUILD_DIR, packs it as .deb and .tar.gz, and uses the .deb's contents
# in tests/consumer. All code of the documentation (DOCS_OBJECTS) calls most public functions, so a
# function without DDP_API does not link.
include("${CMAKE_CURRENT_LIST_DIR}/run.cmake")
file(REMOVE_RECURSE "${WORK_DIR}")

# Same settings as the build of this test, so that ccache has compiled it already.
run(${CMAKE_COMMAND} -S "${SOURCE_DIR}" -B "${SHARED_BUILD_DIR}" -G "${GENERATOR}"
  "-DCMAKE_BUILD_TYPE=${CONFIG}" "-DCMAKE_CXX_COMPILER=${CXX}" "-DTorch_DIR=${TORCH_DIR}"
  "-DDDP_WITH_CUDA=${WITH_CUDA}" "-DDDP_SANITIZE=${SANITIZE}" "-DDDP_WERROR=${WERROR}"
  "-DCMAKE_UNITY_BUILD_BATCH_SIZE=${BATCH}" -DBUILD_SHARED_LIBS=ON
  -DDDP_BUILD_TESTS=OFF -DDDP_BUILD_EXAMPLES=OFF -DDDP_BUILD_BENCHMARKS=OFF)
run(${CMAKE_COMMAND} --build "${SHARED_BUILD_DIR}" --config "${CONFIG}")

run(${CMAKE_CPACK_COMMAND} --config "${SHARED_BUILD_DIR}/CPackConfig.cmake" -C "${CONFIG}"
  -B "${WORK_DIR}/packages")
file(GLOB archive "${WORK_DIR}/packages/ddp-*-torch2.*.tar.gz")
file(GLOB deb "${WORK_DIR}/packages/ddp_*+torch2.*.deb")
if(NOT archive OR NOT deb)
  message(FATAL_ERROR "expected a .tar.gz and a .deb that name LibTorch's version, got:\n${output}")
endif()
run(dpkg-deb --field "${deb}" Depends)
if(NOT output MATCHES "libc6 \\(>= 2\\.[0-9]+\\), libstdc\\+\\+6 \\(>= [0-9]+\\)")
  message(FATAL_ERROR "expected the versions of libc6 and libstdc++6 that it needs, got:\n${output}")
endif()
run(dpkg-deb --extract "${deb}" "${WORK_DIR}/deb")
run(${CMAKE_COMMAND} -E make_directory "${WORK_DIR}/tar")
run(tar -xzf "${archive}" --strip-components=1 -C "${WORK_DIR}/tar")
file(GLOB_RECURSE in_deb RELATIVE "${WORK_DIR}/deb/usr" "${WORK_DIR}/deb/usr/*")
file(GLOB_RECURSE in_archive RELATIVE "${WORK_DIR}/tar" "${WORK_DIR}/tar/*")
if(NOT in_archive STREQUAL in_deb)
  message(FATAL_ERROR "expected the same files in .deb and .tar.gz, got ${in_deb} and ${in_archive}")
endif()
set(prefix "${WORK_DIR}/deb/usr")
file(GLOB library "${prefix}/lib*/libddp.so.*.*.*")
foreach(file IN ITEMS bin/ddprun include/ddp/ddp.h share/ddp/README.md share/ddp/CHANGELOG.md)
  if(NOT library OR NOT EXISTS "${prefix}/${file}")
    message(FATAL_ERROR "expected libddp.so and ${file} in the packages, got ${in_deb}")
  endif()
endforeach()

# The library's name has a version, and it exports only public symbols, none of internal classes.
run(readelf -d "${library}")
if(NOT output MATCHES "SONAME[^\n]*libddp\\.so\\.[0-9]+\\.[0-9]+\\]")
  message(FATAL_ERROR "expected a version in the library's name, got:\n${output}")
endif()
run(nm -DC --defined-only "${library}")
if(NOT output MATCHES " ddp::DistributedDataParallelBase::" OR output MATCHES " ddp::(Reducer|GroupMonitor)::")
  message(FATAL_ERROR "expected ddp's public symbols and no others, got:\n${output}")
endif()

run(nm -D --defined-only "${library}")
set(shown "${output}")
run(nm --undefined-only ${DOCS_OBJECTS})
string(REGEX MATCHALL "_ZN?K?3ddp[A-Za-z0-9_]+" called "${output}")
list(LENGTH called number_called)
if(number_called LESS 50)
  message(FATAL_ERROR "expected the documentation's code to call most of ddp, got ${called}")
endif()
foreach(symbol IN LISTS called)
  if(NOT shown MATCHES " ${symbol}\n")
    message(FATAL_ERROR "${symbol}: expected libddp.so to show what a program may call. Declare it DDP_API.")
  endif()
endforeach()

use_as_consumer(consumer "${CXX}" ${oldest_standard} "-Dddp_ROOT=${prefix}" "-DTorch_DIR=${TORCH_DIR}")
