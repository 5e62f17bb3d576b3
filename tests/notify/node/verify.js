// Reads {secret, body, headers} and answers whether the signature holds.
const { Webhook, WebhookVerificationError } = require("standardwebhooks");
const { secret, body, headers } = JSON.parse(require("fs").readFileSync(0, "utf8"));
try {
  new Webhook(secret).verify(Buffer.from(body, "base64"), headers);
  console.log("accepted");
} catch (error) {
  if (!(error instanceof WebhookVerificationError)) throw error;
  console.log("refused");
}
