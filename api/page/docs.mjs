/** The OpenAPI document, shown by Swagger UI: nothing of it is loaded from elsewhere, and nothing is sent to its validator. */

globalThis.SwaggerUIBundle({ url: "/openapi.json", dom_id: "#docs", deepLinking: false, validatorUrl: null });
