{{- define "name" -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "labels" -}}
{{ include "selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* The release's pods: servers, and for dynamo frontends. */}}
{{- define "selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* The pods that clients connect to. */}}
{{- define "facing" -}}
{{ include "selector" . }}
app.kubernetes.io/component: {{ eq .Values.shape "dynamo" | ternary "frontend" "server" }}
{{- end }}

{{- define "port" -}}
{{ get (dict "cog" 5000 "openai" 3000 "dynamo" 8080) .Values.shape }}
{{- end }}

{{/* Requests that wait, of all servers together. */}}
{{- define "waiting" -}}
{{- $names := dict "cog" "cog_triton_requests_waiting" "openai" "vllm:num_requests_waiting" "dynamo" "dynamo_frontend_queued_requests" -}}
sum({{ get $names .Values.shape }}{namespace="{{ .Release.Namespace }}", pod=~"{{ include "name" . }}-.+"})
{{- end }}

{{/* Truthy when Triton's ports are bound to all addresses, for its metrics or the predictor's. */}}
{{- define "opensTriton" -}}
{{- if and .Values.metrics.enabled (or .Values.metrics.triton (eq .Values.shape "cog")) -}}
true
{{- end }}
{{- end }}

{{/* Names of the ports that have /metrics, as JSON. */}}
{{- define "metricsPorts" -}}
{{- $ports := get (dict "cog" (list "predictor") "openai" (list "http") "dynamo" (list "http" "system")) .Values.shape -}}
{{- if include "opensTriton" . }}{{ $ports = append $ports "triton" }}{{ end -}}
{{- toJson $ports }}
{{- end }}

{{/* Refuse servers that would each have a journal of their own, or share one. */}}
{{- define "checkStore" -}}
{{- $store := get .Values.settings "STORE" | default "0" }}
{{- if not (has (lower $store) (list "0" "false" "no" "none" "off")) }}
{{- fail (printf "settings.STORE is %s: the chart puts the journal on a volume, by store.enabled with replicas 1; settings.STORE may only be 0, which stores nothing" $store) }}
{{- end }}
{{- if .Values.store.enabled }}
{{- $journal := "store.enabled: a journal of stored responses belongs to one server" }}
{{- if eq .Values.shape "dynamo" }}
{{- fail "store.enabled: the shape dynamo stores nothing, so there is nothing to keep on a volume" }}
{{- end }}
{{- if hasKey .Values.settings "STORE" }}
{{- fail "store.enabled: settings.STORE turns off what store.enabled turns on; set one of them" }}
{{- end }}
{{- if .Values.autoscaling.enabled }}
{{- fail (printf "%s, so autoscaling.enabled must be false; or set store.enabled to false, and nothing is stored" $journal) }}
{{- end }}
{{- if ne (int .Values.replicas) 1 }}
{{- fail (printf "%s, and replicas is %d: half of the lookups would find nothing; set replicas to 1, or store.enabled to false, and nothing is stored" $journal (int .Values.replicas)) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{- define "image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end }}

{{/* How Dynamo's parts find each other, and the address that each gives the others. */}}
{{- define "dynamoEnvironment" -}}
- { name: DYN_DISCOVERY_BACKEND, value: {{ .Values.dynamo.discovery }} }
{{- if eq .Values.dynamo.discovery "etcd" }}
- { name: ETCD_ENDPOINTS, value: {{ .Values.dynamo.etcdEndpoints | quote }} }
{{- else }}
- { name: DYN_FILE_KV, value: /discovery }
{{- end }}
{{- range list "DYN_TCP_RPC_HOST" "DYN_TCP_RESPONSE_STREAM_HOST" "DYN_EVENT_PLANE_HOST" }}
- { name: {{ . }}, valueFrom: { fieldRef: { fieldPath: status.podIP } } }
{{- end }}
{{- end }}

{{/* Where every container may write, and the volumes that are only read. */}}
{{- define "mounts" -}}
- { name: tmp, mountPath: /tmp }
- { name: home, mountPath: /home/cog }
- { name: cache, mountPath: /home/cog/.cache }
{{- if .Values.modelsClaim }}
- { name: models, mountPath: /models, readOnly: true }
{{- end }}
{{- if and (eq .Values.shape "dynamo") (eq .Values.dynamo.discovery "file") }}
- { name: discovery, mountPath: /discovery }
{{- end }}
{{- end }}

{{- define "volumes" -}}
- { name: tmp, emptyDir: {} }
- { name: home, emptyDir: {} }
{{- if or .Values.cache.create .Values.cache.existingClaim }}
- name: cache
  persistentVolumeClaim: { claimName: {{ .Values.cache.existingClaim | default (printf "%s-cache" (include "name" .)) }} }
{{- else }}
- { name: cache, emptyDir: {} }
{{- end }}
{{- if .Values.modelsClaim }}
- name: models
  persistentVolumeClaim: { claimName: {{ .Values.modelsClaim }}, readOnly: true }
{{- end }}
{{- if and (eq .Values.shape "dynamo") (eq .Values.dynamo.discovery "file") }}
- name: discovery
  persistentVolumeClaim: { claimName: {{ .Values.dynamo.fileClaim }} }
{{- end }}
{{- end }}
