{{- define "autotune.rayAddress" -}}
{{ if .Values.ray.enabled }}{{ .Release.Name }}-head-svc:6379{{ else }}{{ .Values.ray.address }}{{ end }}
{{- end }}
{{- define "autotune.databaseUrl" -}}
{{ if .Values.postgresql.enabled -}}
postgresql://autotune:{{ urlquery .Values.postgresql.password | replace "+" "%20" }}@{{ .Release.Name }}-postgresql:5432/autotune
{{- else }}{{ .Values.database.url }}{{ end }}
{{- end }}
{{- define "autotune.database" -}}
- name: AUTOTUNE_DB
  valueFrom:
    secretKeyRef: {name: {{ .Release.Name }}-database, key: url}
- name: AUTOTUNE_SECRET_KEY
  valueFrom:
    secretKeyRef: {name: {{ .Release.Name }}-database, key: secret-key}
{{- end }}
