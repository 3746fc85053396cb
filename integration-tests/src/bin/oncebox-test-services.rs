//! One PostgreSQL, one Kafka and one Redis for several test programs: prints where they are, one environment variable a line, then
//! `ready`, and stops them when its standard input ends.

use oncebox_integration_tests::services::{
    KAFKA, KAFKA_PROXY, KAFKA_SASL, Kafka, POSTGRES_URL, Postgres, REDIS_URL, Redis,
};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let (postgres, kafka, redis) =
        tokio::try_join!(Postgres::obtain(), Kafka::obtain(), Redis::obtain())?;
    println!("{POSTGRES_URL}={}", postgres.url());
    println!("{KAFKA}={}", kafka.bootstrap());
    println!("{KAFKA_PROXY}={}", kafka.proxy_routes());
    if let Some(sasl) = kafka.sasl_bootstrap() {
        println!("{KAFKA_SASL}={sasl}");
    }
    println!("{REDIS_URL}={}", redis.url());
    println!("ready");
    tokio::io::copy(&mut tokio::io::stdin(), &mut tokio::io::sink()).await?;
    Ok(())
}
