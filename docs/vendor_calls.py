"""Writes the table of the vendor's calls into docs/vendor_client.md. `python docs/vendor_calls.py`.

The table is all that follows `## Calls`, at the end of the page. What is served stands in proto/vendor_wire.
"""

from pathlib import Path
from typing import Final

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from vendor_wire import appliance_pb2, control_pb2, management_pb2

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "vendor_client.md"
HEADING: Final = "## Calls\n"

# The other calls of release 2.10.0, by service.
REFUSED: Final = {
    "ClusterManagement": (
        "SubmitJob PollIngress DeleteJob CancelJob DeleteImageBuildJob SendClientHeartbeat InitSdkCompileJob "
        "InitSdkExecuteJob SubscribeMessages PublishMessages GetJobInitStatus GetReservationStatus "
        "CheckStorageConnectivity CreateWorkloadManager GetWorkloadManager UpdateWorkloadManager "
        "DeleteWorkloadManager ListWorkloadManager"
    ),
    "CsCtlV1": (
        "ListJobs Patch ListResourceTypes CreateLogExport GetLogExport DownloadLogExport ClearWorkerCache "
        "GetServerConfig CancelJobV2 GetDebugArtifactStatus UpdateDebugArtifactStatus "
        "GetClusterTopology GetJobTopology ReportSystemEvent ListSystemEvents"
    ),
    "Appliance": (
        "UnaryRunInference UnaryGetOutput UnaryMonitorCheck UnaryNotifyStall UnaryNotifyCrash "
        "UnaryReconfigure UnaryCancelPrompt UnaryClearCache UnaryDebugOperation UnaryProgramDevice UnaryDebugDevice "
        "UnaryDebugDeviceDone UnaryGetNetworkType UnaryRuntimeInitialized UnaryGetCwd UnaryGetHostProfileBins "
        "SendInputStream SendCMDStateStream SendCMDStateBidirStream SaveWeights GetCMDStateStream FileUploadStream "
        "FileDownloadStream GetHostProfileBinsStream InferenceStream InferenceStatsStream "
        "UnaryAllocateMultiModalComponent InferenceTokenBidirStream InferenceBootstrapIbv "
        "UnaryTerminateDraftIbox0Runtime InferenceFileUploadStream UnaryPrepareEncoderTask UnaryCancelEncoderTask "
        "SendEncoderInputStream"
    ),
}
SERVICES: Final = (
    management_pb2.DESCRIPTOR.services_by_name["ClusterManagement"],
    control_pb2.DESCRIPTOR.services_by_name["CsCtlV1"],
    appliance_pb2.DESCRIPTOR.services_by_name["Appliance"],
)


def _is_empty(method: MethodDescriptor) -> bool:
    return method.input_type.name == "Unread" and method.output_type.name in ("Empty", "Outcome")


def _served(service: ServiceDescriptor, *, empty: bool) -> str:
    return ", ".join(sorted(method.name for method in service.methods if _is_empty(method) is empty))


def page() -> str:
    """The page, with the table as it is now."""
    text, found, _ = PAGE.read_text().partition(HEADING)
    assert found, f"{PAGE} has no {HEADING}"
    rows = []
    for service in SERVICES:
        names = sorted(REFUSED[service.name].split())
        assert not set(names) & set(service.methods_by_name), f"{service.name} both serves and refuses a call"
        rows.append(f"| {service.name} | served | {_served(service, empty=False)} |")
        rows.append(f"| | empty answer | {_served(service, empty=True) or '-'} |")
        rows.append(f"| | refused | {', '.join(names)} |")
    return f"{text}{HEADING}\n| service | | calls |\n|---|---|---|\n" + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
