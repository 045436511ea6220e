{{- /* The Job of a JobSet: any end but a good one fails it, and the set's rules say what follows. All of it starts
again, as new pods: a Job of its own would wait longer and longer before it makes pods anew. */ -}}
{{- define "lambert.jobSet" -}}
network:
  enableDNSHostnames: true
  publishNotReadyAddresses: true  # ranks meet before a pod is ready
failurePolicy:
  maxRestarts: {{ .root.Values.restarts }}
  restartStrategy: Recreate
  rules:
    - name: stopped  # or disrupted: what was saved goes on, and that costs none of the restarts
      action: RestartJobSetAndIgnoreMaxRestarts
      onJobFailureReasons: [PodFailurePolicy]
      onJobFailureMessagePatterns: ["exit code 75 ", "condition DisruptionTarget "]
    - name: refused  # started again it would be refused again
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
