# cpack: what cmake --install installs, as a .tar.gz to unpack anywhere and as a .deb below /usr.
# The names say which LibTorch the library was built with, for it works with no other.
if(DDP_CUDA)
  set(ddp_torch_name torch${ddp_torch_release}-cuda)
else()
  set(ddp_torch_name torch${ddp_torch_release}-cpu)
endif()

set(CPACK_PACKAGE_NAME ddp)
set(CPACK_PACKAGE_VENDOR "the ddp developers")
set(CPACK_PACKAGE_CONTACT "the ddp developers <ddp@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_GENERATOR "TGZ;DEB")
set(CPACK_STRIP_FILES ON)
set(CPACK_PACKAGE_FILE_NAME
  ddp-${PROJECT_VERSION}-${ddp_torch_name}-${CMAKE_SYSTEM_NAME}-${CMAKE_SYSTEM_PROCESSOR})

set(CPACK_DEBIAN_PACKAGE_VERSION ${PROJECT_VERSION}+${ddp_torch_name})
set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
if(CMAKE_CROSSCOMPILING AND CMAKE_SYSTEM_PROCESSOR STREQUAL "aarch64")
  set(CPACK_DEBIAN_PACKAGE_ARCHITECTURE arm64) # otherwise the build machine's
endif()
# LibTorch is in no Debian package, so shlibdeps has no name for it. The versions are those of this
# machine: an older system may lack what the library took from them.
set(ddp_libc "")
set(ddp_libstdcxx "")
execute_process(COMMAND getconf GNU_LIBC_VERSION OUTPUT_VARIABLE ddp_glibc ERROR_QUIET)
if(ddp_glibc MATCHES "([0-9]+\\.[0-9]+)")
  set(ddp_libc " (>= ${CMAKE_MATCH_1})")
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION MATCHES "^([0-9]+)")
  set(ddp_libstdcxx " (>= ${CMAKE_MATCH_1})")
endif()
set(CPACK_DEBIAN_PACKAGE_DEPENDS "libc6${ddp_libc}, libstdc++6${ddp_libstdcxx}")
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS "g++, cmake (>= 3.25), libcli11-dev")
set(CPACK_DEBIAN_PACKAGE_DESCRIPTION "${PROJECT_DESCRIPTION}
 Built with LibTorch ${Torch_VERSION}, which is not part of the package: give
 CMake the folder of that version, as docs/building.md in /usr/share/ddp says.")

include(CPack)
