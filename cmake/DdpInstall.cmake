# cmake --install: the libraries, the package that find_package(ddp) finds, and the examples; rooms install their
# headers and programs. The package brings LibTorch along by the same DdpTorch.cmake that found it for this build.
# Nothing that is installed holds a path of the machine that built it.
include(CMakePackageConfigHelpers)
set(ddp_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/ddp)

if(BUILD_SHARED_LIBS)
  # An installed libddp.so does not know where LibTorch lies; the program that uses both does. Its
  # DT_RPATH is searched for the libraries that libddp.so needs as well, its DT_RUNPATH is not.
  target_link_options(ddp INTERFACE $<INSTALL_INTERFACE:LINKER:--disable-new-dtags>)
endif()
# libddp.so and the archives can be installed in one folder: the component `libraries` adds the second kind.
set(ddp_kind Static)
if(BUILD_SHARED_LIBS)
  set(ddp_kind Shared)
endif()
install(TARGETS ddp ddp_core ddp_checkpoint ddp_training ddp_parallel EXPORT ddpTargets COMPONENT libraries)
install(EXPORT ddpTargets NAMESPACE ddp:: FILE ddp${ddp_kind}Targets.cmake
  DESTINATION ${ddp_package_dir} COMPONENT libraries)

if(DDP_HAS_MPI)
  install(EXPORT ddpMpiTargets NAMESPACE ddp:: DESTINATION ${ddp_package_dir})
  install(FILES ${CMAKE_CURRENT_LIST_DIR}/DdpFindMpi.cmake DESTINATION ${ddp_package_dir})
endif()

string(REGEX MATCH "^[0-9.]+" ddp_torch_release "${Torch_VERSION}") # without +cpu, +cu130
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
install(FILES ${PROJECT_SOURCE_DIR}/README.md ${PROJECT_SOURCE_DIR}/CHANGELOG.md
  ${PROJECT_SOURCE_DIR}/CONTRIBUTING.md DESTINATION ${CMAKE_INSTALL_DATADIR}/ddp)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/docs ${PROJECT_SOURCE_DIR}/examples
  DESTINATION ${CMAKE_INSTALL_DATADIR}/ddp
  PATTERN docs/site EXCLUDE)
