"""Lists the fields of CustomJobSpec and its messages, as in gcloud's YAML, and the names of its enums.

https://docs.cloud.google.com/gemini-enterprise-agent-platform/reference/rest/v1/CustomJobSpec
Importing the SDK for this takes over a second; a test compares these tables with the installed SDK.
"""

from collections.abc import Mapping

# message -> field -> type: string, bool, int32, int64, Duration, an enum or a message; [] marks a list.
MESSAGES: Mapping[str, Mapping[str, str]] = {
    "CustomJobSpec": {"persistentResourceId": "string", "workerPoolSpecs": "WorkerPoolSpec[]",
                      "scheduling": "Scheduling", "serviceAccount": "string", "network": "string",
                      "reservedIpRanges": "string[]", "pscInterfaceConfig": "PscInterfaceConfig",
                      "baseOutputDirectory": "GcsDestination", "protectedArtifactLocationId": "string",
                      "tensorboard": "string", "enableWebAccess": "bool", "enableDashboardAccess": "bool",
                      "experiment": "string", "experimentRun": "string", "models": "string[]"},
    "WorkerPoolSpec": {"containerSpec": "ContainerSpec", "pythonPackageSpec": "PythonPackageSpec",
                       "machineSpec": "MachineSpec", "replicaCount": "int64", "nfsMounts": "NfsMount[]",
                       "lustreMounts": "LustreMount[]", "diskSpec": "DiskSpec"},
    "ContainerSpec": {"imageUri": "string", "command": "string[]", "args": "string[]", "env": "EnvVar[]"},
    "EnvVar": {"name": "string", "value": "string"},
    "PythonPackageSpec": {"executorImageUri": "string", "packageUris": "string[]", "pythonModule": "string",
                          "args": "string[]", "env": "EnvVar[]"},
    "MachineSpec": {"machineType": "string", "acceleratorType": "AcceleratorType", "acceleratorCount": "int32",
                    "gpuPartitionSize": "string", "tpuTopology": "string",
                    "reservationAffinity": "ReservationAffinity"},
    "ReservationAffinity": {"reservationAffinityType": "Type", "key": "string", "values": "string[]"},
    "NfsMount": {"server": "string", "path": "string", "mountPoint": "string"},
    "LustreMount": {"instanceIp": "string", "volumeHandle": "string", "filesystem": "string", "mountPoint": "string"},
    "DiskSpec": {"bootDiskType": "string", "bootDiskSizeGb": "int32"},
    "Scheduling": {"timeout": "Duration", "restartJobOnWorkerRestart": "bool", "strategy": "Strategy",
                   "disableRetries": "bool", "maxWaitDuration": "Duration"},
    "PscInterfaceConfig": {"networkAttachment": "string", "dnsPeeringConfigs": "DnsPeeringConfig[]"},
    "DnsPeeringConfig": {"domain": "string", "targetProject": "string", "targetNetwork": "string"},
    "GcsDestination": {"outputUriPrefix": "string"},
}  # fmt: skip

# Without the "unspecified" names.
ENUMS: Mapping[str, tuple[str, ...]] = {
    "AcceleratorType": ("NVIDIA_TESLA_K80", "NVIDIA_TESLA_P100", "NVIDIA_TESLA_V100", "NVIDIA_TESLA_P4",
                        "NVIDIA_TESLA_T4", "TPU_V2", "TPU_V3", "NVIDIA_TESLA_A100", "NVIDIA_A100_80GB", "TPU_V4_POD",
                        "NVIDIA_L4", "TPU_V5_LITEPOD", "NVIDIA_H100_80GB", "NVIDIA_H100_MEGA_80GB",
                        "NVIDIA_H200_141GB", "NVIDIA_B200", "NVIDIA_GB200", "NVIDIA_RTX_PRO_6000"),
    "Type": ("NO_RESERVATION", "ANY_RESERVATION", "SPECIFIC_RESERVATION"),
    "Strategy": ("ON_DEMAND", "LOW_COST", "STANDARD", "SPOT", "FLEX_START"),
}  # fmt: skip
