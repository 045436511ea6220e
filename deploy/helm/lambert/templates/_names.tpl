{{- define "lambert.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "lambert.selector" . }}
{{- end }}

{{- /* Of the run's pods, and of nothing else. */ -}}
{{- define "lambert.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: {{ ternary "data-prep" "trainer" .Values.dataPrep.enabled }}
{{- end }}

{{- /* Of the Job, JobSet or TrainJob. */ -}}
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

{{- /* The image of a repository: (list . repository) */ -}}
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

{{- /* A quantity such as 64Gi, in Mi. */ -}}
{{- define "lambert.mebibytes" -}}
{{- $factor := dict "Mi" 1 "Gi" 1024 "Ti" 1048576 -}}
{{ mul (int64 (regexFind "^[0-9]+" .)) (get $factor (regexFind "[A-Za-z]+$" .)) }}
{{- end }}

{{- /* A text, or a number as YAML writes it, in quotes: Go would print ten million as 1e+07. */ -}}
{{- define "lambert.word" -}}
{{ kindIs "string" . | ternary . (toYaml .) | quote }}
{{- end }}
