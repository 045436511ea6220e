{{- define "lambert.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "lambert.selector" . }}
{{- end }}

{{- /* Labels that select this release's pods and nothing else. */ -}}
{{- define "lambert.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: {{ ternary "data-prep" "trainer" .Values.dataPrep.enabled }}
{{- end }}

{{- /* Metadata of the Job, JobSet or TrainJob. */ -}}
{{- define "lambert.workload" -}}
name: {{ .Release.Name }}
labels:
  {{- include "lambert.labels" . | nindent 2 }}
  {{- with .Values.queue }}
  kueue.x-k8s.io/queue-name: {{ . }}
  {{- end }}
{{- with .Values.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* The image reference of a repository. Argument: (list . repository). */ -}}
{{- define "lambert.image" -}}
{{- $image := (index . 0).Values.image -}}
{{- if $image.digest -}}
{{ index . 1 }}@{{ $image.digest }}
{{- else -}}
{{ index . 1 }}:{{ $image.tag | default (index . 0).Chart.AppVersion }}
{{- end }}
{{- end }}

{{- define "lambert.runsClaim" -}}
{{ .Values.runs.claim | default (printf "%s-runs" .Release.Name) }}
{{- end }}

{{- /* Converts a quantity such as 64Gi to Mi. */ -}}
{{- define "lambert.mebibytes" -}}
{{- $factor := dict "Mi" 1 "Gi" 1024 "Ti" 1048576 -}}
{{ mul (int64 (regexFind "^[0-9]+" .)) (get $factor (regexFind "[A-Za-z]+$" .)) }}
{{- end }}

{{- /* Quotes a string, or a number as YAML prints it: Go would print ten million as 1e+07. */ -}}
{{- define "lambert.word" -}}
{{ kindIs "string" . | ternary . (toYaml .) | quote }}
{{- end }}
