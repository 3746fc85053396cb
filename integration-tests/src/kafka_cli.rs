//! Kafka's own command-line tools, run from the jars: an independent witness of what the product claims.

use std::process::Stdio;

use anyhow::{Context, Result, bail};
use tokio::process::Command;

use crate::services::jars;

/// Runs a tool class with arguments; its standard output.
///
/// # Errors
/// Java or the jars are missing, or the tool failed; the text holds its error output.
pub async fn run(class: &str, arguments: &[&str]) -> Result<String> {
    let libs = jars::libs().await?;
    let output = Command::new("java")
        // short-lived: no time for the optimising compiler
        .args(["-XX:TieredStopAtLevel=1", "-Xmx512m", "-cp"])
        .arg(jars::class_path(libs))
        .arg(format!(
            "-Dlog4j2.configurationFile={}",
            libs.join("log4j2.properties").display()
        ))
        .arg("-Doncebox.log.level=ERROR")
        .arg(class)
        .args(arguments)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .context("cannot run java")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        bail!(
            "{class} {arguments:?}: {}\n{text}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(text)
}

/// `kafka-console-consumer --from-beginning --isolation-level read_committed`: one line per record with partition, offset,
/// headers, key and payload, separated by tabs. Ends when nothing has come for `idle_ms` milliseconds.
///
/// # Errors
/// As [`run`].
pub async fn console_consumer(bootstrap: &str, topic: &str, idle_ms: u32) -> Result<Vec<String>> {
    let idle = idle_ms.to_string();
    let printed = run(
        "org.apache.kafka.tools.consumer.ConsoleConsumer",
        &[
            "--bootstrap-server",
            bootstrap,
            "--topic",
            topic,
            "--from-beginning",
            "--isolation-level",
            "read_committed",
            "--timeout-ms",
            &idle,
            "--property",
            "print.partition=true",
            "--property",
            "print.offset=true",
            "--property",
            "print.headers=true",
            "--property",
            "print.key=true",
            "--property",
            "headers.separator=,",
        ],
    )
    .await?;
    Ok(printed.lines().map(str::to_owned).collect())
}

/// `kafka-consumer-groups --describe --group`: the committed offsets, as the tool prints them.
///
/// # Errors
/// As [`run`].
pub async fn describe_group(bootstrap: &str, group: &str) -> Result<String> {
    let class = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand";
    run(
        class,
        &[
            "--bootstrap-server",
            bootstrap,
            "--describe",
            "--group",
            group,
        ],
    )
    .await
}

/// `kafka-topics --describe --topic`.
///
/// # Errors
/// As [`run`].
pub async fn describe_topic(bootstrap: &str, topic: &str) -> Result<String> {
    let class = "org.apache.kafka.tools.TopicCommand";
    run(
        class,
        &[
            "--bootstrap-server",
            bootstrap,
            "--describe",
            "--topic",
            topic,
        ],
    )
    .await
}

/// `kafka-transactions describe --transactional-id`: coordinator, producer id and epoch, state.
///
/// # Errors
/// As [`run`].
pub async fn describe_transaction(bootstrap: &str, transactional_id: &str) -> Result<String> {
    let class = "org.apache.kafka.tools.TransactionsCommand";
    run(
        class,
        &[
            "--bootstrap-server",
            bootstrap,
            "describe",
            "--transactional-id",
            transactional_id,
        ],
    )
    .await
}

/// `kafka-acls` with these arguments, for instance `["--add", "--allow-principal", "User:alice", "--operation", "Write",
/// "--topic", "orders"]`. Who comes through the plain listener is a super user.
///
/// # Errors
/// As [`run`].
pub async fn acls(bootstrap: &str, arguments: &[&str]) -> Result<String> {
    let mut all = vec!["--bootstrap-server", bootstrap];
    all.extend(arguments);
    run("org.apache.kafka.tools.AclCommand", &all).await
}
