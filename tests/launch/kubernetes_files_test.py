"""The files of examples/launch for Kubernetes are what its API takes.
usage: kubernetes_files_test.py <examples/launch> <a folder for packages of PyPI>

The kinds of Kubernetes are compared with its schema, of PyPI's kubernetes-validate. Other kinds have
schemas in clusters only: of these the pods are compared, and what their controllers ask for is written
here by hand. Ends with 77 where the package cannot be installed.
"""

import copy
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from pypi_packages import use_packages  # noqa: E402

VERSION = "1.31.0"  # the first in which all fields of kubernetes.yaml are stable
# The fields that each kind has, of those that the files may use; a name with "!" is required.
TRAINER = {"image", "command", "args", "numNodes", "numProcPerNode", "env", "resourcesPerNode"}
JOB_SET = {"network", "failurePolicy", "replicatedJobs!", "successPolicy", "startupPolicy"}
SHAPES = {
    ("kubeflow.org/v1", "PyTorchJob"): {
        "spec": {"runPolicy", "pytorchReplicaSpecs!", "elasticPolicy", "nprocPerNode"},
        "spec.pytorchReplicaSpecs": {"Master!", "Worker!"},
        "spec.pytorchReplicaSpecs.*": {"replicas!", "restartPolicy!", "template!"},
        "spec.runPolicy": {"backoffLimit", "cleanPodPolicy", "ttlSecondsAfterFinished"},
    },
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): {
        "spec": {"mlPolicy!", "podGroupPolicy", "template!"},
        "spec.mlPolicy": {"numNodes", "torch!"},
        "spec.mlPolicy.torch": {"numProcPerNode"},
        "spec.template": {"metadata", "spec!"},
        "spec.template.spec": JOB_SET,
        "spec.template.spec.failurePolicy": {"maxRestarts", "rules"},
        "spec.template.spec.replicatedJobs.*": {"name!", "replicas", "template!"},
    },
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): {
        "spec": {"runtimeRef!", "trainer!", "suspend", "labels", "annotations"},
        "spec.runtimeRef": {"apiGroup", "kind", "name!"},
        "spec.trainer": TRAINER,
    },
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): {
        "spec": JOB_SET,
        "spec.network": {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"},
        "spec.failurePolicy": {"maxRestarts", "rules"},
        "spec.replicatedJobs.*": {"name!", "replicas", "template!"},
    },
}
FILES = {
    "kubernetes.yaml": ["Service", "Job"],
    "jobset.yaml": ["JobSet"],
    "pytorchjob.yaml": ["PyTorchJob"],
    "trainjob.yaml": ["TrainingRuntime", "TrainJob"],
}


def at(value, path):
    """Yields what a path leads to; "*" is every element of a list or a mapping."""
    step, _, rest = path.partition(".")
    if step == "*":
        found = list(value.values() if isinstance(value, dict) else value)
    else:
        found = [value[step]] if step in value else []
    for child in found:
        yield from at(child, rest) if rest else [child]


def faults_of_shape(document, shape):
    """Returns the fields that the kind does not have, and those that it lacks."""
    faults = []
    for path, fields in shape.items():
        known = {field.rstrip("!") for field in fields}
        needed = {field.rstrip("!") for field in fields if field.endswith("!")}
        for value in at(document, path):
            faults += [f"{path}.{name}: no such field" for name in set(value) - known]
            faults += [f"{path}.{name}: missing" for name in needed - set(value)]
    return faults


def faults_of_core(document):
    """Returns what Kubernetes' schema says of one of its own kinds."""
    import kubernetes_validate

    try:
        kubernetes_validate.validate(document, VERSION, strict=True)
        return []
    except kubernetes_validate.ValidationError as error:
        place = ".".join(str(step) for step in error.path)
        return [f"{place}: {error.message}"]


def pods_of(document):
    """Returns the templates of pods in a document of another kind, each as a Job of Kubernetes."""
    path = {
        "PyTorchJob": "spec.pytorchReplicaSpecs.*.template",
        "TrainingRuntime": "spec.template.spec.replicatedJobs.*.template",
        "JobSet": "spec.replicatedJobs.*.template",
    }.get(document["kind"])
    jobs = []
    for template in at(document, path) if path else []:
        is_pod = "containers" in template["spec"]
        spec = {"template": template} if is_pod else template["spec"]
        jobs.append({
            "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "of-a-template"},
            "spec": spec,
        })  # fmt: skip
    if document["kind"] == "TrainJob":
        trainer = document["spec"]["trainer"]
        container = {name: trainer[name] for name in ("image", "command", "args", "env")}
        pod = {"containers": [{"name": "node", **container}], "restartPolicy": "Never"}
        jobs.append({
            "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "of-a-trainer"},
            "spec": {"template": {"spec": pod}},
        })  # fmt: skip
    return jobs


def faults_of(document):
    shape = SHAPES.get((document["apiVersion"], document["kind"]))
    if shape is None:
        return faults_of_core(document)
    faults = faults_of_shape(document, shape)
    pods = pods_of(document)
    faults += [] if pods else ["expected pods, got none"]
    for pod in pods:
        faults += faults_of_core(pod)
    return faults


def check_that_faults_are_found(documents):
    """Breaks each document once, as a typing error would."""
    for document in documents:
        broken = copy.deepcopy(document)
        broken["spec"]["temlate"] = {}
        assert faults_of(broken), f"{document['kind']}: expected a fault of a field that is none"
    for kind, path in {
        "Job": "spec.template.spec.containers.*",
        "JobSet": "spec.replicatedJobs.*.template.spec.template.spec.containers.*",
        "PyTorchJob": "spec.pytorchReplicaSpecs.Worker.template.spec.containers.*",
        "TrainJob": "spec.trainer",
        "TrainingRuntime": "spec.template.spec.replicatedJobs.*.template.spec.template.spec.containers.*",
    }.items():
        broken = copy.deepcopy(next(one for one in documents if one["kind"] == kind))
        next(at(broken, path))["image"] = 7
        assert any("7 is not" in fault for fault in faults_of(broken)), f"{kind}: expected a fault"


def main():
    use_packages(sys.argv[2], ["kubernetes-validate"])
    import yaml

    folder = pathlib.Path(sys.argv[1])
    names = sorted(path.name for path in folder.glob("*.yaml"))
    assert names == sorted(FILES), f"expected {sorted(FILES)}, got {names}"
    faults, documents = [], []
    for name, kinds in FILES.items():
        found = list(yaml.safe_load_all((folder / name).read_text()))
        assert [one["kind"] for one in found] == kinds, f"{name}: expected {kinds}"
        faults += [f"{name}: {one['kind']}: {fault}" for one in found for fault in faults_of(one)]
        documents += found
    if faults:
        sys.exit("\n".join(faults))
    check_that_faults_are_found(documents)
    print(f"{len(FILES)} files with {len(documents)} objects are as their kinds ask for")


main()
