{{- /* The Job of a JobSet. Any failed pod fails the Job, and the JobSet's rules decide what happens next: all pods are
recreated at once. A plain Job would wait longer after each failure before it creates new pods. */ -}}
{{- define "lambert.jobSet" -}}
network:
  enableDNSHostnames: true
  publishNotReadyAddresses: true  # ranks meet before a pod is ready
failurePolicy:
  maxRestarts: {{ .root.Values.restarts }}
  restartStrategy: Recreate
  rules:
    - name: stopped  # or disrupted: continues from the checkpoint, without using up a restart
      action: RestartJobSetAndIgnoreMaxRestarts
      onJobFailureReasons: [PodFailurePolicy]
      onJobFailureMessagePatterns: ["exit code 75 ", "condition DisruptionTarget "]
    - name: refused  # a restart would be refused again
      action: FailJobSet
      onJobFailureReasons: [PodFailurePolicy]
replicatedJobs:
  - name: node
    replicas: 1
    template:
      metadata:
        labels:
          {{- include "lambert.labels" .root | nindent 10 }}
          {{- if eq .root.Values.kind "trainjob" }}
          trainer.kubeflow.org/trainjob-ancestor-step: trainer
          {{- end }}
      spec:
        completionMode: Indexed
        completions: {{ .root.Values.nodes }}
        parallelism: {{ .root.Values.nodes }}
        backoffLimit: 0
        podReplacementPolicy: Failed
        podFailurePolicy:
          rules:
            - action: FailJob
              onExitCodes: {containerName: node, operator: In, values: [2]}
            - action: FailJob
              onExitCodes: {containerName: node, operator: In, values: [75]}
            - action: FailJob
              onPodConditions: [{type: DisruptionTarget, status: "True"}]
        template:
          metadata:
            {{- include "lambert.podMetadata" .root | nindent 12 }}
          spec:
            {{- include "lambert.pod" . | nindent 12 }}
{{- end }}
