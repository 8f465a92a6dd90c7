# cmake --install: beside the headers and ddprun, which their rooms install, the library and the
# package that find_package(ddp) finds. The package brings LibTorch along by the same
# DdpTorch.cmake that found it for this build.
include(CMakePackageConfigHelpers)
set(ddp_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/ddp)

set_target_properties(ddp PROPERTIES
  VERSION ${PROJECT_VERSION}
  SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
  # An installed shared library finds LibTorch where it was linked from.
  INSTALL_RPATH_USE_LINK_PATH ON)
install(TARGETS ddp EXPORT ddpTargets)
install(EXPORT ddpTargets NAMESPACE ddp:: DESTINATION ${ddp_package_dir})

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/ddpConfig.cmake.in
  ${PROJECT_BINARY_DIR}/ddpConfig.cmake
  INSTALL_DESTINATION ${ddp_package_dir}
  NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/ddpConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/ddpConfig.cmake
  ${PROJECT_BINARY_DIR}/ddpConfigVersion.cmake
  ${CMAKE_CURRENT_LIST_DIR}/DdpTorch.cmake
  DESTINATION ${ddp_package_dir})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
