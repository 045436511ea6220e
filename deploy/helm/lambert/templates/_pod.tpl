{{- /* Settings shared by training and data preparation: identity and placement. */ -}}
{{- define "lambert.podCommon" -}}
restartPolicy: Never
{{- with .Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch  # do not chown every checkpoint at each start
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- range $key := list "schedulerName" "priorityClassName" "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with get $.Values $key }}
{{ toYaml (dict $key .) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "lambert.podMetadata" -}}
labels:
  {{- include "lambert.labels" . | nindent 2 }}
{{- $annotations := .Values.podAnnotations }}
{{- if not .Values.dataPrep.enabled }}
{{- $annotations = set (deepCopy $annotations) "checksum/config" (include "lambert.config" . | sha256sum) }}
{{- end }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "lambert.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- if and .Values.rdma.resource (not .Values.dataPrep.enabled) }}
  add: [IPC_LOCK]
{{- end }}
{{- end }}

{{- /* All writable paths, as in docker/Dockerfile; the root file system is read-only. */ -}}
{{- define "lambert.scratchEnv" -}}
- {name: HOME, value: /home/lambert}
- {name: TMPDIR, value: /tmp}
- {name: TRITON_CACHE_DIR, value: /cache/triton}
- {name: TORCH_EXTENSIONS_DIR, value: /cache/torch}
- {name: MPLCONFIGDIR, value: /cache/matplotlib}
{{- range $name, $value := .Values.env }}
- {name: {{ $name }}, value: {{ include "lambert.word" $value }}}
{{- end }}
{{- end }}

{{- define "lambert.scratchMounts" -}}
- {name: scratch, mountPath: /home/lambert, subPath: home}
- {name: scratch, mountPath: /tmp, subPath: tmp}
- {name: scratch, mountPath: /cache, subPath: cache}
{{- end }}

{{- /* A pod of the run. Argument: (dict "root" . "master" NAME), NAME being node 0's host name, or "" if a controller
sets it. */ -}}
{{- define "lambert.pod" -}}
{{- $v := .root.Values -}}
{{- $grace := $v.terminationGracePeriodSeconds | default (include "lambert.grace" .root) | int -}}
{{- include "lambert.podCommon" .root }}
terminationGracePeriodSeconds: {{ $grace }}
{{- if $v.rdma.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
containers:
  - name: node  # Kubeflow Trainer expects this name
    image: {{ include "lambert.image" (list .root $v.image.repository) }}
    imagePullPolicy: {{ $v.image.pullPolicy }}
    command: [python, -m, deploy.launch]
    args: [--grace-seconds, {{ sub $grace 5 | quote }}, --config, /etc/lambert/run.yaml]
    env:
      {{- with .master }}
      - {name: PET_NNODES, value: {{ $v.nodes | quote }}}
      - {name: PET_NPROC_PER_NODE, value: {{ include "lambert.ranks" $ | quote }}}
      - name: PET_NODE_RANK
        valueFrom: {fieldRef: {fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
      - {name: PET_MASTER_ADDR, value: {{ . }}}
      - {name: PET_MASTER_PORT, value: "29500"}
      {{- end }}
      {{- include "lambert.scratchEnv" .root | nindent 6 }}
    {{- with $v.envFrom }}
    envFrom:
      {{- range . }}
      - secretRef: {name: {{ . }}}
      {{- end }}
    {{- end }}
    ports:
      - {name: metrics, containerPort: {{ $v.metricsPort }}}
    # No probe: it could kill a run that is compiling, loading or saving. LambertStalled and LambertAbsent report hangs.
    resources: {{- include "lambert.resources" .root | nindent 6 }}
    securityContext: {{- include "lambert.securityContext" .root | nindent 6 }}
    volumeMounts:
      - {name: config, mountPath: /etc/lambert, readOnly: true}
      {{- if not (include "lambert.address" .root) }}
      - {name: runs, mountPath: {{ $v.runs.path }}}
      {{- end }}
      {{- if $v.data.claim }}
      - {name: data, mountPath: {{ $v.data.path }}, readOnly: true}
      {{- end }}
      {{- if include "lambert.cached" .root }}
      - {name: shards, mountPath: /shards}
      {{- end }}
      - {name: shm, mountPath: /dev/shm}
      {{- include "lambert.scratchMounts" .root | nindent 6 }}
volumes:
  - {name: config, configMap: {name: {{ .root.Release.Name }}}}
  {{- if not (include "lambert.address" .root) }}
  - {name: runs, persistentVolumeClaim: {claimName: {{ include "lambert.runsClaim" .root }}}}
  {{- end }}
  {{- with $v.data.claim }}
  - {name: data, persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}}
  {{- end }}
  {{- if include "lambert.cached" .root }}
  - {name: shards, emptyDir: {sizeLimit: {{ $v.shardCache }}}}
  {{- end }}
  - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $v.shm }}}}
  - {name: scratch, emptyDir: {sizeLimit: {{ $v.scratch }}}}
{{- end }}

{{- define "lambert.ranks" -}}
{{ .root.Values.gpus | default .root.Values.cpuRanks }}
{{- end }}

{{- define "lambert.resources" -}}
{{- $devices := dict -}}
{{- if .Values.gpus -}}
{{- $devices = set $devices .Values.gpuResource (int .Values.gpus) -}}
{{- end -}}
{{- with .Values.rdma.resource -}}
{{- $devices = set $devices . (int $.Values.rdma.count) -}}
{{- end -}}
{{- $requests := merge (dict "cpu" .Values.resources.cpu "memory" .Values.resources.memory) $devices -}}
{{- $limits := merge (dict "memory" .Values.resources.memory) $devices -}}
{{- toYaml (dict "requests" $requests "limits" $limits) -}}
{{- end }}
